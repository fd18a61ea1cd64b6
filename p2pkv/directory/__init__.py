"""The directory: who is in the cluster, and which of them know where a page lies."""
