"""A secondary tier of vLLM's offloading: what its host memory has goes on to the cluster, and comes back from there."""
