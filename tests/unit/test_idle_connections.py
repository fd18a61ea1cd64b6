"""Connections that nobody needs any more go: a burst of one reader must not fill an owner for good."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

import p2pkv.peers.connections
from cluster import eventually
from pair import NBYTES, N, Pair, run_all

N_THREADS = 12


def serving_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names.count("p2pkv-tcp-serve")


def test_connections_of_a_burst_are_closed_when_they_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2pkv.peers.connections, "IDLE_S", 0.5)
    pair = Pair(tmp_path, transports=["tcp"])
    keys = pair.publish()
    memories = [np.zeros((N, NBYTES), np.uint8) for _ in range(N_THREADS)]
    for memory in memories:
        pair.reader.register_memory(memory)
    together = threading.Barrier(N_THREADS)

    def fetch(memory: np.ndarray) -> None:
        together.wait()
        assert pair.reader.fetch(keys, memory).all()

    run_all([lambda memory=memory: fetch(memory) for memory in memories])  # type: ignore[misc]
    assert serving_threads() > 0
    eventually(lambda: serving_threads() == 0, 20.0)
    assert pair.fetch_is_right(keys)
    pair.close()
    assert "p2pkv-idle" not in {thread.name for thread in threading.enumerate()}
