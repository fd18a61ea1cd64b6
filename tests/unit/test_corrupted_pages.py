"""Bytes that are spoiled on their way: a miss where checksums are verified, and unseen where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import pages
from p2pkv import Node, Outcome
from p2pkv.transports.base import Transport
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import N, Pair


def corrupted_fetch(tmp_path: Path, verify: str) -> tuple[list[str], NDArray[np.uint8], Pair]:
    def extra() -> list[Transport]:
        return [FaultyTransport(TcpTransport(), Faults(corrupt=True))]

    pair = Pair(tmp_path, extra, verify=verify)
    keys = pair.publish()
    outcomes = pair.reader.fetch(keys, pair.destination)
    return keys, outcomes, pair


def missed_by_checksum(node: Node) -> float:
    return sum(v for k, v in node.counters().items() if "missed" in k and 'reason="checksum"' in k)


def test_corrupted_bytes_are_misses_where_checksums_are_verified(tmp_path: Path) -> None:
    _, outcomes, pair = corrupted_fetch(tmp_path, "checksum")
    assert (outcomes == Outcome.MISS).all()
    assert missed_by_checksum(pair.reader) == N
    pair.close()


def test_without_the_checksum_the_same_sabotage_goes_unseen(tmp_path: Path) -> None:
    keys, outcomes, pair = corrupted_fetch(tmp_path, "generation")
    assert (outcomes == Outcome.HIT).all()
    assert pages.wrong(pair.destination, keys, outcomes) == keys
    assert missed_by_checksum(pair.reader) == 0
    pair.close()
