"""What look-ups say of a page that several nodes hold: not only the one that is read first."""

from __future__ import annotations

import numpy as np

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.cache.page_cache import PageCache
from p2pkv.testing.ports import free_port

NBYTES = 4096
N_PAGES = 32
SETTLE_S = 10.0


def test_a_look_up_names_every_holder_whoever_is_asked() -> None:
    """Two thirds of the keys are other nodes' to answer for, over the wire."""
    join = [f"127.0.0.1:{free_port()}"]
    with (
        Node.start(Config(node_id="a", join=join, replicas=1)) as a,
        Node.start(Config(node_id="b", join=join, replicas=1)) as b,
        Node.start(Config(node_id="reader", join=join, replicas=1)) as reader,
    ):
        eventually(lambda: len(reader.members()) == 3, SETTLE_S)
        rows = np.ones((N_PAGES, NBYTES), np.uint8)
        keys = [f"page-{i}" for i in range(N_PAGES)]
        for holder in (a, b):
            holder.register_memory(rows)
            eventually(lambda holder=holder: len(holder.members()) == 3, SETTLE_S)
            assert all(holder.publish(keys, rows))
        cache, caching = reader._cache, reader._parts.caching
        assert isinstance(cache, PageCache)
        _, raw = cache.hash(keys)

        def is_each_named_twice() -> bool:
            """Look up anew until there are channels: over the control socket one holder is named."""
            cache.locations.drop(raw)
            assert reader.exists(keys).all()
            return all(caching._other_holders.of(raw[i : i + 1]).size for i in range(N_PAGES))

        eventually(is_each_named_twice, SETTLE_S)
