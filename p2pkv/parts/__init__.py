"""What a node is made of: the control plane, what moves bytes, and, unless its pool is of no size, a cache."""
