"""Engines that attach to the node of their host: its pool is theirs, and outlives them."""
