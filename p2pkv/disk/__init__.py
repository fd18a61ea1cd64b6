"""The disk tier: what the pool evicts stays on disk, and survives a restart."""
