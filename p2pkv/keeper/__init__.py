"""Who keeps the memory of a node's pool while no node has it."""
