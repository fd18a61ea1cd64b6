"""Reaching peers: handshakes, and connections that are lent to one batch at a time."""
