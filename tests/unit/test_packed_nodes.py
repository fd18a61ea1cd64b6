"""Nodes with ``compression``: packed pages come over every transport, from every medium, into any pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster import eventually
from p2pkv import Config, Node, Outcome, Pieces
from p2pkv.transports.base import Transport
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import Pair

N, HALF = 12, 24 << 10
KEYS = [f"page {i}" for i in range(N)]


def bfloat16(seed: int) -> NDArray[np.uint8]:
    """Return rows of normally distributed numbers."""
    numbers = np.random.default_rng(seed).standard_normal((N, HALF // 2), np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class Halves:
    """Pages of which keys and values lie in two registered memories."""

    def __init__(self, node: Node, k: NDArray[np.uint8], v: NDArray[np.uint8]) -> None:
        self.k, self.v = k, v
        node.register_memory(k)
        node.register_memory(v)
        rows = [[(row.ctypes.data, HALF) for row in rows] for rows in zip(k, v, strict=True)]
        self.pieces = Pieces(np.array(rows, np.int64))

    def is_as(self, other: Halves) -> bool:
        return bool((self.k == other.k).all() and (self.v == other.v).all())


def zeros(node: Node) -> Halves:
    return Halves(node, np.zeros((N, HALF), np.uint8), np.zeros((N, HALF), np.uint8))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("compression", ["lossless", "auto"])
def test_packed_pages_come_into_pieces_of_several_memories(
    tmp_path: Path, transport: str, compression: str
) -> None:
    pair = Pair(
        tmp_path, compression=compression, transports=[transport], pool_size="8MiB", verify="checksum"
    )
    source = Halves(pair.owner, bfloat16(1), bfloat16(2))
    assert pair.owner.publish(KEYS, source.pieces).all()
    counters = pair.owner.counters()
    assert counters["p2pkv_packing"] == 1
    assert counters["p2pkv_packed_pages_total"] == N
    assert counters["p2pkv_packing_bytes_total"] == 2 * N * HALF
    assert counters["p2pkv_pool_used_bytes"] == counters["p2pkv_packing_stored_bytes_total"] < 2 * N * HALF
    for node in pair.nodes:
        target = zeros(node)
        # an owner of entries that a busy machine keeps silent is not waited for, and costs a miss
        eventually(lambda node=node, target=target: bool(node.fetch(KEYS, target.pieces).all()), 10.0)
        assert target.is_as(source)
    pair.close()


def test_damaged_packed_pages_are_misses_where_checksums_are_verified(tmp_path: Path) -> None:
    def extra() -> list[Transport]:
        return [FaultyTransport(TcpTransport(), Faults(corrupt=True))]

    pair = Pair(tmp_path, extra, compression="lossless", pool_size="8MiB", verify="checksum")
    source = Halves(pair.owner, bfloat16(1), bfloat16(2))
    assert pair.owner.publish(KEYS, source.pieces).all()
    assert (pair.reader.fetch(KEYS, zeros(pair.reader).pieces) == Outcome.MISS).all()
    missed = {key: n for key, n in pair.reader.counters().items() if "missed" in key and n > 0}
    assert sum(missed.values()) == N
    assert all("checksum" in key or "unreadable" in key for key in missed)
    pair.close()


def test_packed_pages_go_to_disk_and_back_as_they_lie(tmp_path: Path) -> None:
    settings = {
        "compression": "lossless",
        "pool_size": "8MiB",
        "disk_path": str(tmp_path / "disk"),
        "disk_size": "64MiB",
    }
    with Node.start(Config.load(settings | {"node_id": "owner"}, environ={})) as node:
        source = Halves(node, bfloat16(1), bfloat16(2))
        assert node.publish(KEYS, source.pieces).all()
        eventually(lambda: node.counters()["p2pkv_disk_stored_pages_total"] == N, 30.0)
        counters = node.counters()
        assert counters["p2pkv_disk_stored_bytes_total"] == 2 * N * HALF
        assert counters["p2pkv_disk_written_bytes_total"] < 0.8 * 2 * N * HALF
    with Node.start(Config.load(settings | {"node_id": "owner"}, environ={})) as node:
        eventually(lambda: node.counters()["p2pkv_disk_pages"] == N, 30.0)
        target = zeros(node)
        assert node.fetch(KEYS, target.pieces, timeout=30.0).all()
        assert target.is_as(source)
        assert node.counters()["p2pkv_pool_pages"] == 0
        reader = Node.start(
            Config.load({"node_id": "reader", "join": [node.address], "pool_size": "1MiB"}, environ={})
        )
        with reader:
            eventually(lambda: len(reader.members()) == len(node.members()) == 2, 30.0)
            target = zeros(reader)
            eventually(lambda: bool(reader.fetch(KEYS, target.pieces, timeout=10.0).all()), 60.0)
            assert target.is_as(source)
        counters = node.counters()
        assert counters["p2pkv_promoted_pages_total"] == N
        assert counters["p2pkv_pool_used_bytes"] < 0.85 * 2 * N * HALF, "promoted pages were unpacked"
