"""Keys whose directory entries lie where a case needs them."""

from __future__ import annotations

import numpy as np

from p2pkv.directory.ring import Ring
from p2pkv.node import Node
from p2pkv.page import Namespace


def keys_at(node: Node, shard: str, prefix: str, n: int) -> list[str]:
    """Return ``n`` keys whose shard is at ``shard``; the same in every process that has the same view."""
    ring = Ring(node.members(), 1)
    wanted = [member.node_id for member in ring.members].index(shard)
    namespace = Namespace(node.config.namespace)
    keys: list[str] = []
    first = 0
    while len(keys) < n:
        step = 2 * (n - len(keys)) + 64
        candidates = [f"{prefix}-{i}" for i in range(first, first + step)]
        owners = ring.owners(namespace.hash(candidates))[:, 0]
        keys += [candidates[i] for i in np.flatnonzero(owners == wanted).tolist()]
        first += step
    return keys[:n]
