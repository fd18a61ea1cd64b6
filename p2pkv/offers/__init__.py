"""Bytes that go from one named node to another: offers, grants and pulls."""
