"""A node that goes on with the pool of the life before: what it finds there, and what it does not."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from can_encrypt import needs_libcrypto
from cluster import eventually
from kept_nodes import KEYS, LATER, adopted, config, fetch, kept_at, publish
from p2pkv import Config, Node
from p2pkv.cli.node import _drained
from p2pkv.cli.signals import EndingSignals
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.client import DirectoryClient
from p2pkv.errors import ConfigError
from p2pkv.testing.lateness import Lateness

_NEVER_S = 86400.0


def wait_known(node: Node, other: Node) -> None:
    """Wait until another node knows of this life of one; that one may begin before the news are there."""
    own = next(member for member in node.members() if member.node_id == "host")
    eventually(lambda: own.boot_epoch in [member.boot_epoch for member in other.members()], 10.0)


def test_a_successor_has_the_pages_and_goes_on(keeper: str) -> None:
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
        assert first.counters()["p2pkv_pool_is_kept"] == 1
        first.retract(KEYS[:4])
        boot = next(member.boot_epoch for member in first.members())
    with Node.start(config(keeper)) as second:
        assert adopted(second) == len(KEYS) - 4
        assert fetch(second, KEYS) == len(KEYS) - 4
        assert next(member.boot_epoch for member in second.members()) > boot
        for first in range(0, len(LATER), 64):  # more than there is room for
            publish(second, LATER[first : first + 64])
        fetch(second, KEYS)
    with Node.start(config(keeper)) as third:
        assert fetch(third, LATER) == adopted(third) > 0


@pytest.mark.parametrize(
    "wire",
    [{}, pytest.param({"transports": ["tcp"], "encrypt": "tcp"}, marks=needs_libcrypto)],
    ids=["plain", "encrypted"],
)
def test_others_and_engines_find_them_again(keeper: str, listen: str, wire: dict[str, object]) -> None:
    # of one replica: what the first life's own shard knew is lost with it, and only announcing mends that
    settings = {"attach_listen": listen, "directory_check": _NEVER_S, "replicas": 1} | wire
    first = Node.start(config(keeper, **settings))
    publish(first, KEYS)
    join = {"join": [first.address]}
    with (
        Node.start(Config(node_id="other", pool_size="1MiB", deadline=20.0, **join, **wire)) as other,
        Node.start(Config(node_id="engine", attach=listen, deadline=20.0, **wire)) as engine,
    ):
        join = {"join": [other.address]}
        for reader in (other, engine):
            eventually(lambda reader=reader: fetch(reader, KEYS) == len(KEYS), 10.0)
        first.close()
        with Node.start(config(keeper, **settings, **join)):
            for reader in (other, engine):
                eventually(lambda reader=reader: fetch(reader, KEYS) == len(KEYS), 10.0)


def test_others_find_them_where_they_were_before_they_are_announced_again(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node.start(Config(node_id="other", pool_size="1MiB", deadline=20.0)) as other:
        settings = {"join": [other.address], "directory_check": _NEVER_S, "replicas": 1}
        first = Node.start(config(keeper, **settings))
        publish(first, KEYS)
        monkeypatch.setattr(Announcer, "owe_everything", lambda _: None)
        # as many as lie with the other one, which is all that says where they are
        eventually(lambda: fetch(other, KEYS) == len(KEYS), 10.0)
        n_known = int(other.counters()["p2pkv_shard_entries"])
        assert n_known > 0
        first.close()
        assert fetch(other, KEYS) == 0
        for _ in range(2):
            with Node.start(config(keeper, **settings)) as again:
                wait_known(again, other)
                # An owner that waits for a processor is left out: a miss is no fault, and one more would be a page.
                eventually(lambda: fetch(other, KEYS) == n_known, 10.0)
                eventually(lambda: other.exists(KEYS).sum() == n_known, 10.0)
        # another memory under that id is not the one they are in
        with Node.start(config("", **settings)) as empty:
            wait_known(empty, other)
            assert fetch(other, KEYS) == 0
        with Node.start(config(keeper, **settings)) as last:
            wait_known(last, other)
            assert fetch(other, KEYS) == 0
            assert fetch(last, KEYS) == len(KEYS)


def test_what_a_killed_life_could_not_take_back_is_over_when_its_successor_has_announced_all(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node.start(Config(node_id="other", pool_size="1MiB", deadline=20.0)) as other:
        settings = {"join": [other.address], "directory_check": _NEVER_S}
        with Node.start(config(keeper, **settings)) as first:
            publish(first, KEYS)
            # A publish returns when the entries are put, or an owner that waits for a processor is left out.
            eventually(lambda: other.counters()["p2pkv_shard_entries"] == len(KEYS), 10.0)
            with monkeypatch.context() as untold:
                untold.setattr(DirectoryClient, "drop", lambda *_, **__: None)
                assert first.retract(KEYS[:16]).all()
        assert int(other.counters()["p2pkv_shard_entries"]) == len(KEYS)
        with Node.start(config(keeper, **settings)) as second:
            eventually(lambda: other.exists(KEYS).tolist() == [0] * 16 + [1] * 16, 10.0)
            boots = {member.node_id: member.boot_epoch for member in second.members()}
            kept = second._parts.membership.view()["host"].kept_since
            assert kept == boots["host"]
            assert fetch(other, KEYS) == 16


def test_what_a_successor_evicts_or_takes_back_is_forgotten_where_the_life_before_put_it(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node.start(Config(node_id="other", pool_size="1MiB", deadline=20.0)) as other:
        settings = {"join": [other.address], "directory_check": _NEVER_S, "replicas": 1}
        with Node.start(config(keeper, **settings)) as first:
            publish(first, KEYS)
        monkeypatch.setattr(Announcer, "owe_everything", lambda _: None)
        with Node.start(config(keeper, **settings)) as second:
            assert int(other.counters()["p2pkv_shard_entries"]) > 0
            wait_known(second, other)
            eventually(lambda: bool(other.exists(KEYS).any()), 10.0)
            second.retract(KEYS[:16])
            for at in range(0, len(LATER), 64):
                publish(second, LATER[at : at + 64])
            eventually(lambda: not other.exists(KEYS).any(), 10.0)


def engine_at(listen: str) -> Node:
    return Node.start(Config(node_id="engine", attach=listen, deadline=20.0))


def wait_attached(engine: Node, is_attached: float) -> None:
    eventually(lambda: engine.counters()["p2pkv_attached"] == is_attached, 10.0)


def test_engines_find_what_the_pool_of_their_node_has_while_it_is_away_and_before_it_announces_it(
    keeper: str, listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Node.start(config(keeper, attach_listen=listen))
    publish(first, KEYS)
    with engine_at(listen) as engine:
        first.close()
        wait_attached(engine, 0)
        assert fetch(engine, KEYS) == len(KEYS)
        assert engine.exists(KEYS).all()
        assert engine.whereabouts(KEYS).outcomes.all()
        assert not engine.exists(LATER).any()
        monkeypatch.setattr(Announcer, "owe_everything", lambda _: None)
        with Node.start(config(keeper, attach_listen=listen, directory_check=_NEVER_S)) as second:
            wait_attached(engine, 1)
            assert fetch(engine, KEYS) == len(KEYS)
            publish(second, LATER[:8])
            second.retract(KEYS[:8])
            assert fetch(engine, [*KEYS, *LATER[:8]]) == len(KEYS)


def test_an_engine_lets_go_of_memory_that_nobody_keeps(listen: str) -> None:
    first = Node.start(Config(node_id="host", attach_listen=listen, pool_size="4MiB"))
    publish(first, KEYS)
    with engine_at(listen) as engine:
        assert fetch(engine, KEYS) == len(KEYS)
        first.close()
        wait_attached(engine, 0)
        eventually(lambda: engine._parts.own_host.pool.get() is None, 10.0)
        assert fetch(engine, KEYS) == 0


def test_an_engine_whose_node_has_gone_misses_without_waiting(listen: str) -> None:
    first = Node.start(Config(node_id="host", attach_listen=listen, pool_size="4MiB"))
    with engine_at(listen) as engine:
        first.close()
        wait_attached(engine, 0)
        eventually(lambda: not engine._parts._reached, 10.0)
        with Lateness() as late:
            assert not engine.exists(KEYS).any()
            assert fetch(engine, KEYS) == 0
        assert late.seconds - late.worst < 10.0  # of 40 that it may take


def test_a_bump_that_a_node_was_not_there_to_hear_holds_for_its_engines(keeper: str, listen: str) -> None:
    first = Node.start(config(keeper, attach_listen=listen))
    publish(first, KEYS)
    with (
        Node.start(Config(node_id="other", pool_size="1MiB", join=[first.address])) as other,
        engine_at(listen) as engine,
    ):
        engine._parts.epochs.close()  # its thread would ask the members once a second
        eventually(lambda: len(other.members()) == len(engine.members()) == 2, 10.0)
        first.close()
        wait_attached(engine, 0)
        eventually(lambda: fetch(engine, KEYS) == len(KEYS), 10.0)
        other.bump(timeout=20.0)
        # Until a member answers in time nothing is found, and from then on nothing of before.
        eventually(lambda: fetch(engine, KEYS) == 0 and engine.epoch == other.epoch, 10.0)
        assert fetch(engine, KEYS) == 0


def test_a_bump_that_a_lone_node_heard_and_went_with_holds_for_its_engines(keeper: str, listen: str) -> None:
    first = Node.start(config(keeper, attach_listen=listen))
    with Node.start(Config(node_id="engine", attach=listen, namespace="model", deadline=20.0)) as engine:
        engine._parts.epochs.close()  # its thread would ask the node once a second
        publish(engine, KEYS)
        assert fetch(engine, KEYS) == len(KEYS)
        first.bump("model")
        first.close()
        wait_attached(engine, 0)
        eventually(lambda: not engine._parts._reached, 10.0)
        assert fetch(engine, KEYS) == 0
        assert not engine.exists(KEYS).any()
        assert not engine.whereabouts(KEYS).outcomes.any()


def test_what_a_bump_took_back_is_not_found_by_a_successor(keeper: str) -> None:
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
        first.bump()
        assert fetch(first, KEYS) == 0
        publish(first, KEYS[:3])
    with Node.start(config(keeper)) as second:
        assert fetch(second, KEYS) == 3
        assert second.epoch > 0


def test_a_bump_of_another_namespace_is_known_to_a_successor(keeper: str) -> None:
    with Node.start(config(keeper)) as first:
        epoch = first.bump("elsewhere").epoch
    with Node.start(config(keeper, namespace="elsewhere")) as second:
        assert second.epoch == epoch


def test_a_node_of_that_id_of_another_cluster_finds_nothing(keeper: str) -> None:
    with Node.start(config(keeper, cluster="blue")) as first:
        publish(first, KEYS)
    with Node.start(config(keeper, cluster="green")) as other:
        assert adopted(other) == 0
        assert fetch(other, KEYS) == 0
    with Node.start(config(keeper, cluster="blue")) as successor:
        assert adopted(successor) == len(KEYS)
        assert fetch(successor, KEYS) == len(KEYS)


def test_a_node_that_has_drained_leaves_nothing(keeper: str) -> None:
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
        first.drain(0.1)
    with Node.start(config(keeper)) as second:
        assert adopted(second) == 0
        assert fetch(second, KEYS) == 0


def test_a_drain_that_is_under_way_is_waited_for_though_a_keeper_has_the_pages(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves none to a successor once it was told to drain: when it is told to end then, others must have them."""
    with (
        Node.start(config(keeper)) as node,
        Node.start(Config(node_id="other", pool_size="4MiB", join=node.address, deadline=20.0)) as other,
    ):
        publish(node, KEYS)
        wait_known(node, other)
        assert other._parts.caching is not None
        prefetcher = other._parts.caching.prefetcher
        was_asked, may_go_on, read = threading.Event(), threading.Event(), prefetcher._read

        def held(*arguments: object) -> object:
            was_asked.set()
            assert may_go_on.wait(30.0)
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(prefetcher, "_read", held)
        node.begin_drain(30.0)
        assert was_asked.wait(30.0)
        with EndingSignals() as ending:
            monkeypatch.setattr(ending, "wait", lambda timeout, *, times: may_go_on.set())
            drained = _drained(node, ending)
        may_go_on.set()
        assert drained is not None
        assert drained.receivers == {"other": len(KEYS)}


def test_a_node_that_has_drained_closes_though_its_keeper_has_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept_at(tmp_path) as keeper:
        node = Node.start(config(keeper))
        publish(node, KEYS)
        node.drain(0.1)
    with caplog.at_level(logging.WARNING):
        node.close()
    assert "does not answer" in caplog.text


def test_memory_of_another_size_is_not_gone_on_with_and_a_new_one_made(
    keeper: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
    with caplog.at_level(logging.WARNING), Node.start(config(keeper, pool_size="8MiB")) as second:
        assert adopted(second) == 0
        publish(second, KEYS)
    assert "this one starts empty: cannot make a pool: what was left has" in caplog.text
    assert "was pool_size changed?" in caplog.text
    with Node.start(config(keeper, pool_size="8MiB")) as third:
        assert fetch(third, KEYS) == len(KEYS)


def test_memory_that_a_successor_does_not_go_on_with_goes_at_once_though_an_engine_maps_it(
    keeper: str, listen: str
) -> None:
    first = Node.start(config(keeper, attach_listen=listen, pool_size="32MiB"))
    publish(first, KEYS)
    memory = os.dup(first._parts.caching.pool.fd)
    try:
        with engine_at(listen) as engine:
            assert fetch(engine, KEYS) == len(KEYS)
            engine._parts.own_host.interrupt()  # it stays with this pool, and attaches to no other
            first.close()
            assert os.fstat(memory).st_blocks * 512 >= 32 << 20
            with Node.start(config(keeper, attach_listen=listen, pool_size="16MiB")) as second:
                assert adopted(second) == 0
                assert engine._parts.own_host.pool.get() is not None
                assert os.fstat(memory).st_blocks * 512 < 2 << 20
                assert fetch(engine, KEYS) == 0
    finally:
        os.close(memory)


def test_two_nodes_of_one_id_do_not_write_to_one_pool(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.parts.kept_pool._ENDED_S", 0.1)
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
        with pytest.raises(ConfigError, match="has not ended: end the process"):
            Node.start(config(keeper))
        assert fetch(first, KEYS) == len(KEYS)


def test_a_start_that_fails_leaves_what_was_left(keeper: str) -> None:
    with Node.start(config(keeper)) as first:
        publish(first, KEYS)
    with pytest.raises(ConfigError):
        Node.start(config(keeper, copy_kernel="of another CPU"))
    with Node.start(config(keeper)) as third:
        assert fetch(third, KEYS) == len(KEYS)
