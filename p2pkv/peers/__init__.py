"""Reaching peers: handshakes, and connections that are leased to one batch at a time."""
