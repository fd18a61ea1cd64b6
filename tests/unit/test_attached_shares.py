"""Each of several attached engines may have its share of its node's pool, and what they use there stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.errors import ConfigError, UsageError

NBYTES = 64 * 1024
N_ROOM = 32
"""Pages that the pool of a host has room for."""
HEARD = "p2pkv_heard_touches_total"
NO_ROOM = 'p2pkv_unpublished_pages_total{reason="no_room"}'


def test_the_host_keeps_what_its_engines_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    memory = np.ones((N_ROOM, NBYTES), np.uint8)
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size=N_ROOM * NBYTES)) as host,
        Node.start(Config(attach=path)) as engine,
    ):
        for node in (host, engine):
            node.register_memory(memory)
        read, unread = [f"read {i}" for i in range(4)], [f"unread {i}" for i in range(4)]
        assert engine.publish([*read, *unread], memory[:8], timeout=20.0).all()
        for i in range(4):
            heard = host.counters()[HEARD]

            def is_heard(heard: float = heard) -> bool:
                assert engine.fetch(read, memory[:4], timeout=20.0).all()
                return host.counters()[HEARD] >= heard + len(read)

            eventually(is_heard, 10.0)
            more = [f"more {i} {k}" for k in range(12)]
            assert engine.publish(more, memory[:12], timeout=20.0).all()
        assert engine.fetch(read, memory[:4], timeout=20.0).all()
        assert not host.exists(unread, timeout=20.0).any()


def test_an_engine_that_publishes_without_end_takes_out_its_own_pages(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((4, NBYTES), np.uint8)
    quiet_keys, last = [f"quiet-{i}" for i in range(4)], []
    config = Config(node_id="host", attach_listen=path, pool_size=N_ROOM * NBYTES, attach_share=0.25)
    with (
        Node.start(config) as host,
        Node.start(Config(attach=path)) as quiet,
        Node.start(Config(attach=path)) as greedy,
    ):
        for engine in (quiet, greedy):
            engine.register_memory(pages)
        assert quiet.publish(quiet_keys, pages, timeout=20.0).all()
        for batch in range(2 * N_ROOM // len(pages)):
            last = [f"greedy-{batch}-{i}" for i in range(len(pages))]
            assert greedy.publish(last, pages, timeout=20.0).all()
        assert quiet.fetch(quiet_keys, pages, timeout=20.0).all()
        assert greedy.fetch(last, pages, timeout=20.0).all()
        told = host.counters()
    assert told["p2pkv_attach_largest_share_bytes"] == 0.25 * N_ROOM * NBYTES
    assert told["p2pkv_attach_share_evicted_pages_total"] == 2 * N_ROOM - N_ROOM // 4
    assert told["p2pkv_pool_used_bytes"] == (0.25 * N_ROOM + 4) * NBYTES
    assert told["p2pkv_attach_share_refused_pages_total"] == 0


def test_what_has_no_room_in_a_share_is_counted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    n_share = N_ROOM // 4
    pages = np.ones((n_share + 3, NBYTES), np.uint8)
    config = Config(node_id="host", attach_listen=path, pool_size=N_ROOM * NBYTES, attach_share=0.25)
    with Node.start(config) as host, Node.start(Config(attach=path)) as engine:
        engine.register_memory(pages)
        outcomes = engine.publish([f"k{i}" for i in range(len(pages))], pages, timeout=20.0)
        assert outcomes[:n_share].all()
        assert not outcomes[n_share:].any()
        assert host.counters()["p2pkv_attach_share_refused_pages_total"] == 3


def test_engines_that_are_away_at_once_find_their_own_shares_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((4, NBYTES), np.uint8)
    quiet_keys = [f"quiet-{i}" for i in range(4)]
    config = Config(node_id="host", attach_listen=path, pool_size=N_ROOM * NBYTES, attach_share=0.25)
    with Node.start(config) as host:
        with (
            Node.start(Config(node_id="quiet", attach=path)) as quiet,
            Node.start(Config(node_id="greedy", attach=path)),
        ):
            quiet.register_memory(pages)
            assert quiet.publish(quiet_keys, pages, timeout=20.0).all()
        with Node.start(Config(node_id="greedy", attach=path)) as greedy:
            greedy.register_memory(pages)
            for batch in range(2 * N_ROOM // len(pages)):
                keys = [f"greedy-{batch}-{i}" for i in range(len(pages))]
                assert greedy.publish(keys, pages, timeout=20.0).all()
        assert host.exists(quiet_keys, timeout=20.0).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attach_share": -0.1}, "attach_share must be 0 to 1 of the pool, not -0.1"),
        ({"attach_share": 1.5}, "attach_share must be 0 to 1 of the pool, not 1.5"),
        ({"attach_share": float("nan")}, "attach_share must be"),
        ({"attach_share": "some"}, "attach_share must be"),
        ({"attach_requests": 0}, "attach_requests must be 1 to 8, not 0"),
        ({"attach_requests": 9}, "attach_requests must be 1 to 8, not 9"),
        ({"attach": "unix:/tmp/s", "attach_share": 0.5}, "the business of the host's node"),
        (
            {"node_id": "n", "attach_share": 0.5, "disk_size": "1GiB", "disk_write": "on_evict"},
            "use 'write_through'",
        ),
    ],
)
def test_limits_of_engines_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=said):
        Config(**settings)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_of_a_batch_larger_than_the_pool_the_front_is_kept_and_nothing_else_is_said_to_be_there(
    tmp_path: Path, share: float
) -> None:
    """It takes several requests, since staging has 16 MiB: each would have the place of the one before."""
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    page, room = 1 << 20, 20
    pages = np.arange(50, dtype=np.uint8)[:, None] * np.ones(page, np.uint8)
    keys = [f"page-{i}" for i in range(len(pages))]
    pool_size = int(room / (share or 1.0)) * page
    with (
        Node.start(
            Config(node_id="host", attach_listen=path, pool_size=pool_size, attach_share=share)
        ) as host,
        Node.start(Config(node_id="engine", attach=path)) as engine,
    ):
        engine.register_memory(pages)
        told = engine.publish(keys, pages, timeout=60.0)
        assert told.tolist() == [1] * room + [0] * (len(pages) - room)
        copies = np.zeros_like(pages)
        engine.register_memory(copies)
        assert engine.fetch(keys, copies, timeout=60.0).tolist() == told.tolist()
        assert (copies[:room] == pages[:room]).all()
        assert engine.counters()[NO_ROOM] == len(pages) - room
        host.register_memory(copies)
        assert host.fetch(keys, copies, timeout=60.0).tolist() == told.tolist()
