"""Pages that calls fetch often from others come into the own pool, within bounds, and go again.

End to end: ``tests/e2e/test_hot_pages.py``. The hunt `guests` looks for those that were taken back and are found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster import eventually
from hot_reader import KEYS, PAGE, SETTLE_S, Reader, asked_of, found, published
from p2pkv import Config, Node, PrefetchOutcome, UsageError
from p2pkv.cache import prefetcher
from p2pkv.cache.hot_guests import Limits
from p2pkv.cache.prefetch import Counting, Prefetch
from p2pkv.errors import ConfigError, ControlError
from p2pkv.page import Keys

N_ROOM = 64
COOLED = "p2pkv_cooled_guests_total"
BROUGHT = 'p2pkv_hot_pages_total{outcome="brought"}'


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(node_id: str, **settings: object) -> Node:
        join = [node.address for node in nodes][:1]
        defaults = {"pool_size": N_ROOM * PAGE, "buffer_size": 0, "deadline": 5.0, "join": join}
        nodes.append(node := Node.start(Config(node_id=node_id, **(defaults | settings))))  # type: ignore[arg-type]
        eventually(lambda: all(len(other.members()) == len(nodes) for other in nodes), SETTLE_S)
        return node

    yield start
    for node in reversed(nodes):
        node.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch of hot pages take long, so that no test depends on how busy the machine is."""
    monkeypatch.setattr(prefetcher, "_HOT_BATCH_S", 5.0)


def test_hot_pages_come_and_are_found_here(start: Callable[..., Node]) -> None:
    owner = start("owner")
    reader = Reader(start("reader"), 16)
    published(owner)
    reader.heat(KEYS[:8], 3.0)
    reader.heat(KEYS[8:], 0.1)
    assert reader.turn() == 8
    assert reader.here() == KEYS[:8]
    assert found(reader.node) == KEYS
    counted = reader.node.counters()
    assert counted[BROUGHT] == 8
    assert counted["p2pkv_hot_bytes_total"] == 8 * PAGE
    assert counted["p2pkv_fetched_guest_pages_total"] == 8
    assert counted['p2pkv_prefetched_pages_total{outcome="brought"}'] == 0
    owner.retract(KEYS[:2])
    assert found(reader.node) == KEYS[2:]
    assert reader.turn() == 6


def test_what_has_cooled_goes(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16)
    reader.heat(KEYS, 3.0)
    assert reader.turn() == len(KEYS)
    reader.heat(KEYS[:4], 0.3)
    assert reader.turn() == len(KEYS), "what is between the two bounds stays, and does not come and go"
    reader.heat(KEYS[:4], 0.2)
    assert reader.turn() == len(KEYS) - 4
    assert reader.here() == KEYS[4:]
    assert reader.node.counters()["p2pkv_cooled_guests_total"] == 4
    assert found(reader.node) == KEYS, "its owner has it"


def test_what_somebody_asked_for_stays(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16)
    reader.heat(KEYS, 3.0)
    assert reader.turn() == len(KEYS)
    prefetch = reader.node.prefetch(KEYS[:3])
    assert prefetch.wait(SETTLE_S)
    assert (prefetch.outcomes == PrefetchOutcome.PRESENT).all()
    with reader.node.pin(KEYS[3:6], 60.0) as pin:
        assert pin.outcomes.all()
        reader.rates.clear()
        assert reader.turn() == 0
        assert reader.here() == KEYS[:6]


def test_what_engines_find_comes_as_what_the_node_finds(start: Callable[..., Node]) -> None:
    owner = start("owner")
    published(owner)
    reader = Reader(start("reader"), 16)
    reader.engine_heats(1, KEYS[:4], 0.3)
    assert reader.turn() == 0, "one engine by itself finds them too seldom"
    reader.engine_heats(2, KEYS[:2], 0.3)
    reader.heat(KEYS[2:3], 0.3)
    assert reader.turn() == 3
    assert reader.here() == KEYS[:3]
    assert reader.node.counters()[BROUGHT] == 3
    assert reader.hot.readings()["p2pkv_attach_found_pages"] == 4
    owner.retract(KEYS[:1])
    assert reader.here() == KEYS[1:3]
    reader.of_engines.clear()
    reader.rates.clear()
    assert reader.turn() == 0, "they go when nobody finds them any more"


def test_an_engine_that_lies_takes_no_more_than_its_part(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 6)
    reader.engine_heats(1, KEYS[:3], 1.0)
    assert reader.turn() == 3
    reader.engine_heats(2, KEYS[3:], 1e9)
    for _ in range(5):
        assert reader.turn() == 6
        assert reader.here()[:3] == KEYS[:3], "what the honest engine finds stays"
    reader.engine_heats(1, KEYS[1:3], 1.0)
    assert reader.turn() == 6
    assert reader.here()[:2] == KEYS[1:3]
    assert len(reader.here()) == 6, "room that nobody else needs is for everybody"
    reader.engine_heats(1, KEYS[:3], 1.0)
    reader.turn()
    assert reader.here()[:3] == KEYS[:3], "and is given back to whose part it is"


def test_the_share_is_never_passed(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 5)
    reader.heat(KEYS, 3.0)
    for _ in range(4):
        assert reader.turn() == 5
        assert len(reader.here()) == 5
    assert reader.node.counters()['p2pkv_hot_pages_total{outcome="no_room"}'] >= 7


def test_what_is_left_of_a_full_share_is_no_room(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 5.5)
    reader.heat(KEYS, 3.0)
    assert reader.turn() == 5
    for _ in range(20):
        reader.now += 1.0
        reader.hot.turn()
        assert reader.hot._bringing is None, "nothing is looked up where nothing can come"
    assert reader.here() == KEYS[:5]


def test_no_more_are_looked_up_than_there_may_be_room_for(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 5)
    asked = asked_of(reader, monkeypatch)
    reader.heat(KEYS[:7], 3.0)
    reader.heat(KEYS[7:], 5.0)
    assert reader.turn() == 5
    assert asked == [KEYS[7:]]


def test_a_page_that_is_too_long_for_the_room_rests_for_longer_each_time(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start("owner")
    published(owner, KEYS[:3])
    published(owner, ["long"], 3 * PAGE)
    reader = Reader(start("reader"), 4)
    asked = asked_of(reader, monkeypatch)
    reader.heat(KEYS[:3], 3.0)
    assert reader.turn() == 3
    reader.heat(["long"], 4.0)
    tries = []
    for second in range(1, 100):
        asked.clear()
        assert reader.turn() == 3
        tries += [second] if asked else []
    assert tries == [1, 11, 31, 71]
    reader.heat(["long"], 0.1)
    reader.turn()
    reader.heat(["long"], 4.0)
    asked.clear()
    reader.turn()
    assert asked == [["long"]], "it has cooled, and is another one"


def test_what_only_had_no_time_comes_next(start: Callable[..., Node]) -> None:
    owner = start("owner")
    published(owner, KEYS[:6], 2 * PAGE)
    reader = Reader(start("reader"), 32, Limits(bytes_a_second=4 * PAGE))
    reader.heat(KEYS[:6], 3.0)
    assert [reader.turn() for _ in range(4)] == [2, 4, 6, 6]


def test_none_goes_for_a_page_that_has_no_room_then(start: Callable[..., Node]) -> None:
    owner = start("owner")
    published(owner, KEYS[:2])
    published(owner, ["long"], 4 * PAGE)
    published(owner, KEYS[2:4], 4 * PAGE)
    reader = Reader(start("reader"), 6)
    reader.heat(KEYS[:2], 1.0)
    reader.heat(["long"], 20.0)
    assert reader.turn() == 3
    reader.heat(KEYS[2:3], 30.0)
    assert reader.turn() == 3
    assert reader.node.counters()[COOLED] == 0, "two small ones make no room for a long one"
    reader.heat(["long"], 10.0)
    assert reader.turn() == 1
    assert reader.here(KEYS[:4]) == [KEYS[2]]
    assert reader.here(["long"]) == []


def test_none_goes_for_pages_that_may_not_come_yet(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 4, Limits(bytes_a_second=2 * PAGE))
    reader.heat(KEYS[:4], 1.0)
    assert [reader.turn(), reader.turn()] == [2, 4]
    reader.heat(KEYS[4:8], 30.0)
    assert reader.turn() == 4
    assert reader.node.counters()[COOLED] == 2
    assert len(reader.here(KEYS[4:])) == 2


def test_what_never_had_its_turn_is_closed_and_who_asks_meanwhile_costs_nothing(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while one prefetch comes after the other."""
    published(start("owner"))
    reader = Reader(start("reader"), 16)

    def never(ids: Keys, epoch: int, deadline: float, room: int, counting: Counting) -> Prefetch:
        return Prefetch(ids, epoch, deadline, room, counting, is_asked_for=False)

    with monkeypatch.context() as patched:
        patched.setattr(reader.caching.prefetcher, "bring_hot", never)
        reader.heat(KEYS, 3.0)
        reader.hot.turn()
        bringing = reader.hot._bringing
        assert bringing is not None
        reader.hot.asked_for(reader.ids([f"other {i}" for i in range(1000)]))
        reader.hot.asked_for(reader.ids(["other", KEYS[3]]))
        assert reader.hot._asked_for == set(map(bytes, reader.ids([KEYS[3]])))
        reader.hot.turn()
        assert reader.hot._bringing is bringing, "its time is not over"
        bringing.prefetch.deadline = 0.0
    assert reader.turn() == len(KEYS)
    assert bringing.prefetch.done()


def test_what_nobody_asked_for_holds_nobody_up(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16)
    seconds: dict[bool, float] = {}
    find_here = reader.caching.prefetcher._find_here

    def finding(prefetch: Prefetch, rows: NDArray[np.int64], until: float) -> NDArray[np.int64]:
        seconds[prefetch.is_asked_for] = until - time.monotonic()
        return find_here(prefetch, rows, until)

    monkeypatch.setattr(prefetcher, "_HOT_BATCH_S", 0.5)
    monkeypatch.setattr(reader.caching.prefetcher, "_find_here", finding)
    reader.heat(KEYS[:1], 3.0)
    reader.turn()
    assert reader.node.prefetch(KEYS[1:]).wait(SETTLE_S)
    assert seconds[False] <= 0.5
    assert seconds[True] > 0.5


def test_pages_that_nobody_hears_of_are_counted(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16)

    def fail(*_: object) -> None:
        raise ControlError("nobody hears")

    with monkeypatch.context() as patched:
        patched.setattr(reader.caching.directory, "put", fail)
        reader.heat(KEYS[:4], 3.0)
        assert reader.turn() == len(reader.here()) == 4
    assert reader.node.counters()["p2pkv_hot_bytes_total"] == 4 * PAGE
    reader.rates.clear()
    assert reader.turn() == len(reader.here()) == 0


def test_a_page_that_comes_just_before_it_is_pinned_stays(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16)
    pin = reader.caching.pool.pin

    def pin_what_came(*args: Any) -> Any:
        reader.heat(KEYS, 3.0)
        assert reader.turn() == len(KEYS)
        return pin(*args)

    monkeypatch.setattr(reader.caching.pool, "pin", pin_what_came)
    with reader.node.pin(KEYS[:3], 60.0) as pinned:
        assert pinned.outcomes.all()
        reader.rates.clear()
        assert reader.turn() == 0
        assert reader.here() == KEYS[:3]


def test_pages_that_are_this_nodes_own_since_their_owner_left_are_no_guests(
    start: Callable[..., Node],
) -> None:
    owner = start("owner")
    reader = Reader(start("reader"), 5)
    published(owner)
    reader.heat(KEYS, 3.0)
    assert reader.turn() == 5
    assert owner._parts.caching is not None
    assert owner._parts.caching.followers.let_go(time.monotonic() + 60.0) == 5
    assert reader.turn() == 5
    assert reader.here() == KEYS[:10], "the share is free again"


def test_odd_lengths_take_whole_blocks_of_the_share(start: Callable[..., Node]) -> None:
    owner = start("owner")
    reader = Reader(start("reader"), 5)
    memory = np.ones((len(KEYS), 100), np.uint8)
    with owner.register_memory(memory):
        assert owner.publish(KEYS, memory).all()
    reader.heat(KEYS, 3.0)
    assert reader.turn() == 5
    assert reader.hot.readings()["p2pkv_hot_guest_bytes"] == 5 * PAGE


def test_much_hotter_pages_take_the_place_of_the_least_hot(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 4)
    reader.heat(KEYS[:4], 2.0)
    assert reader.turn() == 4
    reader.heat(KEYS[4:6], 3.0)
    assert reader.turn() == 4
    assert reader.here() == KEYS[:4], "a little hotter is no reason"
    reader.heat(KEYS[4:6], 30.0)
    reader.heat(KEYS[1:3], 1.0)
    assert reader.turn() == 4
    assert reader.here() == [KEYS[0], *KEYS[3:6]]


def test_so_many_bytes_come_in_a_second_and_no_more(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = Reader(start("reader"), 16, Limits(bytes_a_second=3 * PAGE))
    reader.heat(KEYS, 3.0)
    assert [reader.turn() for _ in range(5)] == [3, 6, 9, 12, 12]


def test_nothing_comes_until_what_was_hot_before_a_bump_is_forgotten(start: Callable[..., Node]) -> None:
    owner = start("owner")
    reader = Reader(start("reader"), 16)
    published(owner)
    reader.heat(KEYS, 3.0)
    assert reader.turn() == len(KEYS)
    owner.bump()
    assert reader.here() == []
    published(owner)
    reader.rates.clear()
    reader.heat(KEYS, 3.0)
    assert reader.turn() == 0
    assert reader.turn(19.0) == 0
    assert reader.turn(2.0) == len(KEYS)


def test_pages_come_from_their_owner_whoever_has_them_as_guests(start: Callable[..., Node]) -> None:
    """Whoever is named first, the source of a guest is who owns it: what that takes back goes everywhere."""
    owner = start("owner")
    readers = [Reader(start(f"reader {i}"), 16) for i in range(3)]
    published(owner)
    for reader in readers:
        reader.heat(KEYS, 3.0)
        # Over the control socket, before there is a channel, one holder is named.
        eventually(lambda reader=reader: reader.turn(11.0) == len(KEYS), SETTLE_S)
    assert owner.counters()["p2pkv_followers"] == 3
    owner.retract(KEYS)
    assert [reader.here() for reader in readers] == [[], [], []]


def test_owners_hear_that_their_pages_are_used(start: Callable[..., Node]) -> None:
    owner = start("owner")
    reader = Reader(start("reader"), 16)
    published(owner)
    reader.heat(KEYS, 3.0)

    def is_heard() -> bool:
        reader.turn()
        found(reader.node, ["nowhere"])  # a look-up makes a channel
        return owner.counters()["p2pkv_heard_touches_total"] >= len(KEYS)

    eventually(is_heard, SETTLE_S)


def test_a_turn_that_takes_long_is_paid_by_a_longer_rest(start: Callable[..., Node]) -> None:
    class Rests(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.seconds.append(timeout or 0.0)
            return len(self.seconds) == 3

    hot_guests = Reader(start("reader"), 1).hot
    rests = hot_guests._closing = Rests()
    turns = iter([0.0, 0.2])

    def turn() -> None:
        until = time.thread_time() + next(turns)
        while time.thread_time() < until:
            pass

    hot_guests.turn = turn  # type: ignore[method-assign]
    hot_guests._run()
    first, after_a_short_one, after_a_long_one = rests.seconds
    assert first == 1.0
    assert after_a_short_one < after_a_long_one
    assert after_a_long_one >= 20 * 0.2


def test_nothing_comes_where_no_share_is_set(start: Callable[..., Node]) -> None:
    published(start("owner"))
    reader = start("reader")
    assert reader._parts.caching is not None
    assert reader._parts.caching.hot_guests is None
    assert "p2pkv-hot-guests" not in {thread.name for thread in threading.enumerate()}
    assert "p2pkv_hot_guest_pages" not in reader.counters()


@pytest.mark.parametrize("share", [-0.1, 0.6, "many"])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises((ConfigError, UsageError), match="hot_share"):
        Config(hot_share=share)  # type: ignore[arg-type]
