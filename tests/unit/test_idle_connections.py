"""Connections to a peer: fetches and pulls share them, and those that nobody needs any more go.

A burst of one reader must not fill an owner for good.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

import p2pkv.peers.connections
from cluster import eventually
from p2pkv.transfers import RowStatus
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


def test_a_pull_reads_over_what_a_fetch_has_opened(tmp_path: Path) -> None:
    # one stream: another one that is tried for its gain has a thread of its own
    pair = Pair(tmp_path, transports=["tcp"], transport_options={"tcp": {"streams": 1}})
    keys = pair.publish()
    assert pair.fetch_is_right(keys)
    n_of_the_fetch = serving_threads()
    rows = np.arange(N * NBYTES, dtype=np.uint64).view(np.uint8).reshape(N, -1)
    into = np.zeros_like(rows)
    with pair.owner.register_memory(rows, readable=True), pair.reader.register_memory(into):
        pair.owner.transfers.offer("request", spans_of(rows))
        statuses = pair.reader.transfers.get(pair.owner.node_id, "request", spans_of(into), timeout=20)
    assert (statuses == RowStatus.OK).all()
    assert np.array_equal(into, rows)
    assert serving_threads() <= n_of_the_fetch
    pair.close()


def spans_of(rows: np.ndarray) -> np.ndarray:
    return np.array([(row.ctypes.data, row.nbytes) for row in rows], np.int64)
