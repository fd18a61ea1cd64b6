"""Routers beside each other: they find each other and the engines, and know what the others have under way."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from test_proxy_workers import get, process

from heartbeats import served
from p2pkv import Config, Node
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.directory.routers import KnownRouters, pack_news
from p2pkv.directory.view import decode
from p2pkv.errors import ControlError, VersionError
from p2pkv.instances.heartbeat import Heart, Instance, Load, Role, State, checked
from p2pkv_proxy.neighbourhood import Around, Neighbourhood
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.shared_load import LIFE_S, MOST_REPLICAS, HeardLoad, ReplicaLoad, ToldLoad, unpack
from patience import PATIENCE

INSTANCE = checked(Instance(url="http://127.0.0.1:9", role=Role.BOTH, id="engine", capacity=4))


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


class Beside:
    """A registry with its neighbourhood, on this loop."""

    def __init__(
        self, keys: ClusterKeys, *, join: tuple[str, ...] = (), replicas: tuple[str, ...] = ()
    ) -> None:
        self.registry = Registry()
        around = Around(
            heartbeats="127.0.0.1:0", keys=keys, has_own_secret=False, join=join, replicas=replicas
        )
        registry = self.registry
        self.around = Neighbourhood(around, registry, registry.under_way, registry.note_replicas)
        self.address = self.around.discovery.address
        self._tasks = [asyncio.ensure_future(work) for work in self.around.work()]

    def list_engine(self) -> None:
        self.registry.list_instance(INSTANCE)
        self.registry.note_probe(INSTANCE.id, is_healthy=True)

    def begin(self, n_tokens: int) -> None:
        tracked = self.registry.get(INSTANCE.id)
        assert tracked is not None
        tracked.begin(n_tokens, 0.0, lambda: None)

    def others(self) -> tuple[int, int]:
        tracked = self.registry.get(INSTANCE.id)
        return (0, 0) if tracked is None else (tracked.n_requests_replicas, tracked.n_tokens_replicas)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.around.close()


async def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20 * PATIENCE
    while not holds():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def wrapped() -> None:
        await test()

    asyncio.run(wrapped())


def test_what_one_router_has_under_way_weighs_at_all_others(secret: str) -> None:
    async def test() -> None:
        keys = cluster_keys(secret)
        first = Beside(keys)
        second = Beside(keys, replicas=(first.address,))
        third = Beside(keys, replicas=(first.address, second.address))
        each = [first, second, third]
        try:
            for router in each:
                router.list_engine()
            first.begin(700)
            second.begin(30)
            await until(lambda: [router.others() for router in each] == [(1, 30), (1, 700), (2, 730)])
            tracked = third.registry.get(INSTANCE.id)
            assert tracked is not None
            assert (tracked.weight, tracked.busy) == (730, 2)
            await first.close()  # says good-bye
            await until(lambda: third.others() == (1, 30))
        finally:
            for router in each:
                await router.close()

    run(test)


def test_who_comes_later_is_told_what_there_is(secret: str) -> None:
    async def test() -> None:
        keys = cluster_keys(secret)
        first = Beside(keys)
        first.list_engine()
        first.begin(700)
        second = Beside(keys, replicas=(first.address,))
        try:
            await until(lambda: second.registry.n_replicas == 1)
            await until(lambda: second.around.replicas.heard.sums() == {INSTANCE.id: (1, 700)})
            second.list_engine()  # an instance that it hears of last
            assert second.others() == (1, 700)
        finally:
            await first.close()
            await second.close()

    run(test)


def test_routers_engines_and_nodes_find_each_other_without_a_routers_name(secret: str) -> None:
    node = Node.start(Config(listen="127.0.0.1:0", pool_size="1MiB", transports="tcp", secret_file=secret))

    async def test() -> None:
        keys = cluster_keys(secret)
        first, second = Beside(keys, join=(node.address,)), Beside(keys, join=(node.address,))
        heart = Heart(INSTANCE, (), keys, lambda: Load(State.READY), interval=0.1, found=node.routers)
        try:
            await until(lambda: set(node.routers()) == {first.address, second.address})
            await until(lambda: len(first.registry) == len(second.registry) == 1)
            first.begin(700)
            await until(lambda: second.others() == (1, 700))
        finally:
            heart.close()
            await first.close()
            await second.close()

    try:
        run(test)
    finally:
        node.close()


def test_one_meeting_place_and_one_routers_name_are_enough(secret: str) -> None:
    async def test() -> None:
        keys = cluster_keys(secret)
        first = Beside(keys)
        each = [first, *(Beside(keys, replicas=(first.address,)) for _ in range(3))]
        heart = Heart(INSTANCE, [each[1].address], keys, lambda: Load(State.READY), interval=0.1)
        try:
            await until(lambda: all(router.registry.n_replicas == 3 for router in each))
            await until(lambda: all(len(router.registry) == 1 for router in each))
            await asyncio.to_thread(heart.close)
            await until(lambda: all(len(router.registry) == 0 for router in each))
        finally:
            heart.close()
            for router in each:
                await router.close()

    run(test)


def test_a_node_forgets_a_router_that_says_nothing_any_more() -> None:
    now = [0.0]
    known = KnownRouters(lambda: now[0])
    assert known.take(pack_news("10.0.0.1:8100", 15.0))
    now[0] = 14.0
    assert known.addresses() == ("10.0.0.1:8100",)
    now[0] = 15.0
    assert known.addresses() == ()


def test_a_node_keeps_no_more_routers_than_it_may_and_none_that_can_not_be() -> None:
    known = KnownRouters()
    for number in range(1000):
        known.take(pack_news(f"10.0.0.1:{number + 1}", 15.0))
    for wrong in ("", "nowhere", "10.0.0.1:0", "x" * 300 + ":1"):
        assert known.take(pack_news(wrong, 15.0))
    assert len(known.addresses()) == 64
    for news in (b"", b"\xff", b"\x81\xa6router\x01", b"\x93\x01\x02\x03", os.urandom(100)):
        assert not known.take(news)


def test_what_one_process_of_a_host_knows_another_takes() -> None:
    now = [100.0]
    known, told = KnownRouters(lambda: now[0]), KnownRouters(lambda: now[0])
    known.take(pack_news("10.0.0.1:8100", 15.0))
    told.take_all(known.pack())
    now[0] = 114.0
    told.take_all(known.pack())
    assert told.addresses() == ("10.0.0.1:8100",)
    now[0] = 115.0  # said by nobody since
    told.take_all(known.pack())
    assert told.addresses() == ()
    for wrong in (b"", b"\xff", b"\x93\x01\x02\x03", msgspec.msgpack.encode([["10.0.0.1:8100"]])):
        with pytest.raises(ControlError):
            told.take_all(wrong)
    told.take_all(
        msgspec.msgpack.encode([["10.0.0.1:8100", math.inf], ["nowhere", 200.0], ["h:1", math.nan]])
    )
    assert told.addresses() == ()


def test_nodes_that_know_of_no_routers_read_their_news_as_an_empty_view() -> None:
    report = decode(pack_news("10.0.0.1:8100", 15.0))
    assert (report.sender, report.members) == ("p2pkv-proxy", ())


def test_messages_of_many_instances_are_cut_into_what_a_socket_takes() -> None:
    told, heard = ToldLoad("10.0.0.1:1"), HeardLoad("other")
    own = {f"instance {number} {'x' * 80}": (1, number) for number in range(1500)}
    now = 0.0
    for _ in range(3):
        for message in told.messages(own, now):
            assert len(message) < 16384
            load = unpack(message)
            assert load is not None
            assert heard.note(load, now)
        now += 0.05
    assert heard.sums() == own
    assert told.messages(own, now) == []


def test_impossible_messages_of_other_routers_are_refused() -> None:
    def packed(**fields: object) -> bytes:
        return msgspec.msgpack.encode({"replica": "r", "sequence": 1, **fields})

    assert unpack(packed()) is not None
    with pytest.raises(VersionError):
        unpack(packed(version=2))
    for wrong in (
        {"at": {"a": (-1, 0)}},
        {"at": {"a": (0, 1 << 40)}},
        {"at": {"": (0, 1)}},
        {"at": {"x" * 2000: (0, 1)}},
        {"at": {"a": "1"}},
        {"sequence": -1},
        {"address": "nowhere"},
        {"replica": "x" * 65},
    ):
        with pytest.raises(ControlError):
            unpack(packed(**wrong))
    with pytest.raises(ControlError):
        unpack(b"\xc1")


def test_more_routers_than_can_be_are_not_kept() -> None:
    heard = HeardLoad("own")
    taken = [heard.note(ReplicaLoad(replica=f"r{n}", sequence=1), 0.0) for n in range(100)]
    assert taken.count(True) == len(heard.replicas) == MOST_REPLICAS
    assert len(heard.expire(LIFE_S + 1.0)) == MOST_REPLICAS
    assert heard.replicas == {}


def test_time_in_which_this_router_was_stopped_counts_against_nobody() -> None:
    heard = HeardLoad("own")
    heard.note(ReplicaLoad(replica="r", sequence=1, at={"a": (1, 1)}), 0.0)
    assert heard.expire(100.0, late=99.9) == []
    assert heard.sums() == {"a": (1, 1)}


def test_what_other_routers_say_makes_no_instance_full_for_good() -> None:
    registry = Registry()
    registry.list_instance(INSTANCE)
    (tracked,) = registry
    registry.note_replicas({INSTANCE.id: (10**6, 0)})
    assert tracked.is_full()
    assert tracked.is_full_by_hearsay()
    registry.note_replicas({INSTANCE.id: (0, 0)})
    tracked.note_load(Load(State.READY, running=4))
    registry.note_replicas({INSTANCE.id: (4, 0)})
    assert tracked.is_full()
    assert not tracked.is_full_by_hearsay(), "the engine says so itself"


@contextmanager
def proxy(secret: str, *options: str) -> Iterator[tuple[str, str]]:
    """Run a router; give its URL and where it takes heartbeats."""
    command = ["-c", "from p2pkv_proxy.cli import main; main()", "--listen", "127.0.0.1:0"]
    command += ["--heartbeats", "127.0.0.1:0", "--secret-file", secret, *options]
    with process(*command) as (started, line):
        found = re.search(r"on (http://\S+), heartbeats on (\S+)", line)
        assert found is not None, line
        yield found[1], found[2]
        started.terminate()
        assert started.wait(20 * PATIENCE) == 0


def test_all_workers_of_a_router_know_what_other_routers_have_under_way(secret: str) -> None:
    async def test(url: str, address: str) -> None:
        keys = cluster_keys(secret)
        other = Beside(keys, replicas=(address,))
        heart = Heart(instance, [address], keys, lambda: Load(State.READY), interval=0.2)
        other.registry.list_instance(instance)
        tracked = other.registry.get(instance.id)
        assert tracked is not None
        tracked.begin(700, 0.0, lambda: None)
        told = f'p2pkv_proxy_instance_replica_tokens{{instance="{instance.id}",role="both"}} 700.0'

        def all_know() -> bool:
            pages = [get(f"{url}/metrics") for _ in range(6)]  # of whichever worker
            return all(told in page and "p2pkv_proxy_replicas 1.0" in page for page in pages)

        try:
            limit = time.monotonic() + 20 * PATIENCE
            while not await asyncio.to_thread(all_know):
                assert time.monotonic() < limit
        finally:
            heart.close()
            await other.close()

    with served() as engine_url, proxy(secret, "--workers", "2") as (url, address):
        instance = checked(Instance(url=engine_url, role=Role.BOTH, id="engine"))
        run(lambda: test(url, address))
