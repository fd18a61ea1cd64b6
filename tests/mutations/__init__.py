"""Bugs that are put back on purpose, one patch each, and the runner that demands that each is found by its hunter."""
