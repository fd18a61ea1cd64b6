"""``p2pkv replay``: what requests that really came would find in a cluster of a given size."""
