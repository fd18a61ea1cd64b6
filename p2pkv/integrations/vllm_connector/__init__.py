"""A KV connector of vLLM: its scheduler side, its worker side, and what they tell each other."""
