"""The page at ``/`` of a node's metrics port: the whole cluster as this node sees it, read only."""
