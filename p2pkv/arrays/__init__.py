"""Arrays that callers pass, of a host or a device, seen without copying."""
