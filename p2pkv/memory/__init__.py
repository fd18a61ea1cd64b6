"""Registered memory, of the host and of devices: what calls may read and write."""
