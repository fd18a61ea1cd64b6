"""Pages taken back by a node with a disk tier: they are gone, wherever they were on their way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node

N, NBYTES = 64, 65536


@pytest.mark.parametrize("how", ["retract", "clear"])
@pytest.mark.parametrize("layout", ["bucket", "file", "offset"])
def test_pages_just_published_do_not_come_back_from_disk(tmp_path: Path, layout: str, how: str) -> None:
    config = Config(
        node_id="n",
        pool_size="64MiB",
        buffer_size=0,
        disk_size="64MiB",
        disk_path=str(tmp_path),
        disk_layout=layout,
    )
    memory = np.ones((N, NBYTES), np.uint8)
    with Node.start(config) as node:
        node.register_memory(memory)
        for turn in range(3):
            keys = [f"{turn}-{i}" for i in range(N)]
            assert node.publish(keys, memory).all()
            if how == "retract":
                assert node.retract(keys).all()
            else:
                assert node.clear() == N
            assert node._parts.caching.tier is not None
            assert node._parts.caching.tier.flush(10.0)
            assert not node.fetch(keys, memory).any()
            eventually(lambda keys=keys: not node.exists(keys).any(), 10.0)  # type: ignore[misc]  # the directory's turn
