"""With four nodes, most entries are asked of others: channels stay open, and nothing else is needed after a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.testing.ports import free_port

N, NBYTES = 256, 4096
CALLS = 200
LATE = 20
"""Calls that a busy machine may keep from an answer in time, so that they ask again or another way."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    secret = tmp_path / "secret"
    secret.write_text("the secret of a test, long enough\n")
    secret.chmod(0o600)
    settings = {
        "secret_file": str(secret),
        "join": [f"127.0.0.1:{free_port()}"],
        "pool_size": 4 << 20,
        "deadline": 5.0,
    }
    nodes = [Node.start(Config.load(settings | {"node_id": f"n{i}"}, environ={})) for i in range(4)]
    eventually(lambda: all(len(node.members()) == 4 for node in nodes), 20.0)
    yield nodes
    for node in nodes:
        node.close()


def test_look_ups_of_pages_that_are_there_keep_every_channel(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    missing: list[int] = []
    give_back, borrow = DirectoryChannels.give_back, DirectoryChannels.borrow

    def count_lost(self: DirectoryChannels, members: object, channels: object, is_usable: list[bool]) -> None:
        lost.append(len(is_usable) - sum(is_usable))
        give_back(self, members, channels, is_usable)  # type: ignore[arg-type]

    def count_missing(self: DirectoryChannels, members: object) -> object:
        channels = borrow(self, members)  # type: ignore[arg-type]
        missing.append(channels.count(None))
        return channels

    memory = np.zeros((N, NBYTES), np.uint8)
    nodes[0].register_memory(memory)
    keys = [f"page-{i}" for i in range(N)]
    assert nodes[0].publish(keys, memory).all()
    reader = nodes[3]
    monkeypatch.setattr(DirectoryChannels, "give_back", count_lost)
    monkeypatch.setattr(DirectoryChannels, "borrow", count_missing)

    def look_up() -> bool:
        """Whether a look-up needed nothing but channels that are there."""
        reader._cache.locations.drop_owner(nodes[0]._parts.own_key)
        missing.clear()
        assert reader.exists(keys).all()
        return not any(missing)

    eventually(look_up, 20.0)
    lost.clear()
    by_channels = sum(look_up() for _ in range(CALLS))
    assert by_channels >= CALLS - LATE
    assert sum(lost) <= LATE
    assert reader.counters()["p2pkv_silent_owners_total"] <= LATE


def test_an_owner_without_a_channel_sends_nobody_else_s_part_another_way(nodes: list[Node]) -> None:
    reader, apart, other = nodes[3], nodes[1], nodes[2]
    apart._parts.caching.directory_server.close()  # as a firewall would, that lets nothing but the control port through

    def asked(node: Node) -> tuple[float, float]:
        counters = node.counters()
        return counters["p2pkv_directory_requests_total"], counters["p2pkv_control_requests_total"]

    def look_up(number: int) -> None:
        reader.exists([f"nobody-has-{number}-{i}" for i in range(N)])

    def is_over_channel() -> bool:
        before = asked(other)
        look_up(-1)
        return asked(other)[0] > before[0]

    eventually(is_over_channel, 20.0)
    before, before_apart = asked(other), asked(apart)
    began = time.monotonic()
    for number in range(CALLS):
        look_up(number)
    probes = 20 * (time.monotonic() - began) + 50
    after = asked(other)
    assert after[0] - before[0] >= CALLS - LATE
    assert after[1] - before[1] <= LATE + probes
    assert asked(apart)[1] - before_apart[1] >= CALLS
