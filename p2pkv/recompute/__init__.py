"""Fetch or recompute: how much of a prompt's KV is worth fetching, judged by what both have taken of late."""
