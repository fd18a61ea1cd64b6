"""Pages from a device by an engine whose node is another process, which is stopped, killed and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from cluster import Cluster, NodeProcess, eventually
from device_buffers import DeviceBuffer
from fake_cuda import FakeCuda
from p2pkv import Config, Node
from p2pkv.testing.processes import ChildEndedError
from pair import NBYTES
from threads import in_a_thread

Allocate = Callable[[int], DeviceBuffer]
PATIENCE = 30.0
ROUND = 16
"""Pages of a round: a call has half of a staging of four granules, and a round half of that."""
STAGING = 4 * ROUND * NBYTES


class Apart:
    """An engine in this process, and its node in another, which can be stopped and killed."""

    def __init__(self, cluster: Cluster, path: str, settings: dict[str, Any], memory: DeviceBuffer) -> None:
        self._cluster, self._path = cluster, path
        self.host = self.start_host()
        config: dict[str, Any] = {"node_id": "engine", "attach": path, "device_staging_size": STAGING}
        self.engine = Node.start(Config.load(settings | config, environ={}))
        self.memory = memory
        self.engine.register_memory(memory.array)

    def start_host(self) -> NodeProcess:
        self.host = self._cluster.start("host", attach_listen=self._path)
        return self.host

    def publish(self, keys: list[str], timeout: float = PATIENCE) -> NDArray[np.uint8]:
        """Publish from the device; its memory is another page's from then on."""
        self.memory.write(pages.filled(keys, NBYTES))
        outcomes = self.engine.publish(keys, self.memory.rows(len(keys), NBYTES), timeout=timeout)
        self.memory.write(np.full((len(keys), NBYTES), 0x5A, np.uint8))
        return outcomes

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def apart(
    cluster: Cluster, path: str, cuda_settings: dict[str, object], allocate: Allocate
) -> Iterator[Apart]:
    memory = allocate(4 * ROUND * NBYTES)
    with closing(Apart(cluster, path, cuda_settings, memory)) as apart:
        yield apart


def test_the_next_round_is_copied_while_one_is_pulled_and_no_further(
    emulated: FakeCuda, apart: Apart
) -> None:
    keys = [f"round {i}" for i in range(4 * ROUND)]
    assert apart.publish(["first"]).all()
    emulated.hold(copies=True)
    before = emulated.counts().copies_to_host
    thread, outcomes = in_a_thread(lambda: apart.publish(keys, 4 * PATIENCE))
    try:
        eventually(lambda: emulated.counts().copies_to_host == before + 1, PATIENCE)
        apart.host.stop()
        emulated.let_through(1)
        eventually(lambda: emulated.counts().copies_to_host == before + 2, PATIENCE)
        emulated.let_go()
        assert emulated.counts().copies_to_host == before + 2, "a third round has no place to go to"
    finally:
        apart.host.resume()
        emulated.hold()
        thread.join(4 * PATIENCE)
    assert outcomes[0].all()
    assert pages.are_fetched(apart.engine, keys, NBYTES, PATIENCE)


def test_what_a_stopped_node_does_not_pull_in_time_is_never_served_with_other_bytes(
    emulated: FakeCuda, apart: Apart
) -> None:
    late, others = [f"late {i}" for i in range(ROUND)], [f"other {i}" for i in range(4 * ROUND)]
    assert apart.publish(["first"]).all()
    emulated.hold(copies=True)
    before = emulated.counts().copies_to_host
    thread, outcomes = in_a_thread(lambda: apart.publish(late, 1.0))
    eventually(lambda: emulated.counts().copies_to_host == before + 1, PATIENCE)
    apart.host.stop()
    emulated.let_go()
    thread.join(PATIENCE)
    assert not outcomes[0].any()
    assert not apart.publish(others, 0.1).any()  # through the same staging
    apart.host.resume()
    eventually(lambda: bool(apart.publish(others).all()), PATIENCE)
    assert pages.are_fetched(apart.engine, others, NBYTES, PATIENCE)
    assert not apart.engine.exists(late).any()
    assert not pages.are_fetched(apart.engine, late, NBYTES, PATIENCE)


def test_a_node_that_comes_back_maps_the_staging_again(apart: Apart) -> None:
    keys = [f"page {i}" for i in range(ROUND)]
    assert apart.publish(keys).all()
    apart.host.kill()
    began = time.monotonic()
    assert not apart.publish(["nobody"], 0.3).any()
    assert time.monotonic() - began < PATIENCE
    apart.start_host()
    eventually(lambda: bool(apart.publish(keys, 1.0).all()), PATIENCE)
    assert pages.are_fetched(apart.engine, keys, NBYTES, PATIENCE)
    eventually(lambda: apart.host.call("counters")["p2pkv_attached_memory_bytes"] == STAGING, PATIENCE)


def test_an_engine_that_is_killed_leaves_whole_pages_only(
    cluster: Cluster, path: str, tmp_path: Path, kind: str, cuda_settings: dict[str, object]
) -> None:
    cluster.start("host", attach_listen=path)
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(16))
    engines = [
        cluster.start("engine", attach=path, device=kind, device_staging_size=STAGING, **cuda_settings)
        for _ in range(2)
    ]
    churned = {"progress": str(progress), "sizes": [NBYTES], "seed": 1, "batch": 2 * ROUND}
    engines[0].send("churn", seconds=PATIENCE, **churned)
    eventually(lambda: int.from_bytes(progress.read_bytes()[:8], "little") > 20, PATIENCE)
    engines[0].kill()
    with pytest.raises(ChildEndedError):
        engines[0].answer()
    last = int.from_bytes(progress.read_bytes()[:8], "little")
    for number in range(last - 10, last + 1):
        keys = [f"hunt-{number}-{i}" for i in range(2 * ROUND)]
        found = engines[1].call("fetch", keys=keys, nbytes=NBYTES)
        assert found["wrong"] == []
        assert all(found["hits"]) or number == last
