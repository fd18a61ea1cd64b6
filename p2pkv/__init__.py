"""p2pkv: a transport-pluggable peer-to-peer KV-cache engine for LLM serving."""
