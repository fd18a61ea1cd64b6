"""KV events: what a node has in memory and on disk, told to routers and indexers in vLLM's schema."""
