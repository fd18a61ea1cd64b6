"""KV events of a node: what is told, in which order, and to whom. The hunt `kv_events` looks for what is not true."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from cluster import eventually
from event_subscriber import Subscriber, residents
from p2pkv import Config, ConfigError, Node, _native, page_key
from p2pkv.kv_events import messages, publisher
from p2pkv.kv_events.publisher import EventPublisher

PAGE = 4096
LOOPBACK = "tcp://127.0.0.1:0"
GOLDEN = Path(__file__).parents[1] / "golden/kv-events-vllm-0.32.0.bin"


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Node, Subscriber]]]:
    undo: list[Node | Subscriber] = []

    def start(**settings: object) -> tuple[Node, Subscriber]:
        defaults = {"node_id": "one", "pool_size": "1MiB", "buffer_size": 0, "deadline": 5.0}
        events = {"kv_events": LOOPBACK, "kv_events_replay": LOOPBACK}
        node = Node.start(Config(**(defaults | events | settings)))  # type: ignore[arg-type]
        assert node.kv_events_endpoint is not None
        assert node.kv_events_replay_endpoint is not None
        subscriber = Subscriber(node.kv_events_endpoint, node.kv_events_replay_endpoint)
        undo.extend((node, subscriber))
        return node, subscriber

    yield start
    for one in reversed(undo):
        one.close()


def publish(node: Node, names: list[str]) -> None:
    memory = np.full((len(names), PAGE), 7, np.uint8)
    with node.register_memory(memory):
        assert node.publish(names, memory).any()


def follow_until(subscriber: Subscriber, is_there: Callable[[], bool]) -> None:
    """Events say when something happened; a subscriber that connects late is told of it by the next, or a replay."""
    deadline = time.monotonic() + 20
    while not (subscriber.is_whole and is_there()):
        assert time.monotonic() < deadline, f"20 s, and {len(subscriber.known)} pages are known"
        if not subscriber.follow(0.1):
            subscriber.replay()


def memory_keys(*names: str, epoch: int = 0) -> set[tuple[str, bytes]]:
    return {("CPU", page_key("default", name, epoch)) for name in names}


def test_what_is_published_and_retracted_is_told(start: Callable[..., tuple[Node, Subscriber]]) -> None:
    node, subscriber = start()
    publish(node, ["a", "b"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("a", "b"))
    node.retract(["a"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("b"))
    assert node.clear() == 1
    follow_until(subscriber, lambda: subscriber.known == set())


def test_evictions_are_told(start: Callable[..., tuple[Node, Subscriber]]) -> None:
    node, subscriber = start(pool_size=8 * PAGE + 64 * 1024)
    for i in range(60):
        publish(node, [f"k{i}"])
    there = residents(node)
    assert 0 < len(there) < 60
    follow_until(subscriber, lambda: subscriber.known == there)


def test_a_bump_clears_all_and_pages_of_the_new_epoch_follow(
    start: Callable[..., tuple[Node, Subscriber]],
) -> None:
    node, subscriber = start()
    publish(node, ["a"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("a"))
    node.bump()
    publish(node, ["b"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("b", epoch=node.epoch))


def test_pages_on_disk_are_told_with_their_medium_and_again_after_a_restart(
    start: Callable[..., tuple[Node, Subscriber]], tmp_path: Path
) -> None:
    disk = {"disk_size": "8MiB", "disk_path": str(tmp_path / "disk")}
    node, subscriber = start(**disk)
    publish(node, ["a", "b"])
    on_disk = {("STORAGE", key) for _, key in memory_keys("a", "b")}
    follow_until(subscriber, lambda: subscriber.known == memory_keys("a", "b") | on_disk)
    last = subscriber.last
    node.close()
    _, later = start(**disk)
    follow_until(later, lambda: later.known == on_disk)
    assert last is not None
    assert later.last is not None
    assert later.last > last


def test_who_missed_more_than_is_kept_is_told_everything(
    start: Callable[..., tuple[Node, Subscriber]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "KEPT", 2)
    node, subscriber = start()
    for i in range(6):
        publish(node, [f"k{i}"])
        batches = node.counters()["p2pkv_kv_event_batches_total"]
        while node.counters()["p2pkv_kv_event_batches_total"] < min(batches, 2):
            time.sleep(0.005)  # looked at again; nobody says so
        node.retract([f"k{i}"])
    publish(node, ["last"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("last"))
    assert subscriber.n_gaps


def test_a_node_that_closes_says_that_nothing_is_there(
    start: Callable[..., tuple[Node, Subscriber]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "GOODBYE_S", 60.0)  # a machine that stands still loses nothing
    node, subscriber = start(disk_size="8MiB", disk_path=str(tmp_path / "disk"))
    publish(node, ["a", "b"])
    follow_until(subscriber, lambda: memory_keys("a", "b") <= subscriber.known)
    node.close()
    deadline = time.monotonic() + 60
    while subscriber.known:
        assert time.monotonic() < deadline, f"{len(subscriber.known)} pages of a closed node are known"
        subscriber.follow(0.1)
    assert subscriber.is_whole


def test_a_goodbye_waits_for_nobody_who_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound it hangs until the test's time is over."""
    monkeypatch.setattr(publisher, "GOODBYE_S", 0.05)
    events = EventPublisher(LOOPBACK, None, "")
    context = zmq.Context()
    silent = context.socket(zmq.SUB)
    silent.set_hwm(1)
    silent.subscribe(b"")
    silent.connect(events.endpoint)
    try:
        deadline = time.monotonic() + 60
        while not silent.poll(10):
            assert time.monotonic() < deadline, "nothing comes in a minute"
            events.send(b"connected?")
        for _ in range(publisher.KEPT):  # 40 MiB: more than the kernel takes for it
            events.send(bytes(20 << 10))
        events.finish(b"goodbye")
    finally:
        context.destroy(linger=0)
        events.close()


def test_a_log_that_nobody_drains_says_that_it_has_lost_some() -> None:
    changes = _native.ChangeLog(4)
    pool = _native.Pool(1 << 20, changes=changes)
    memory = np.zeros((6, PAGE), np.uint8)
    pieces = np.array([[[row.ctypes.data, PAGE]] for row in memory], np.int64)
    keys = np.arange(6, dtype=np.uint8)[:, None].repeat(16, axis=1)
    pool.publish(keys, pieces)
    drained, kinds, is_lost = changes.drain(10)
    assert is_lost
    assert len(drained) == len(kinds) < 6
    pool.retract(keys[:1].copy())
    drained, kinds, is_lost = changes.drain(10)
    assert not is_lost
    assert drained.tobytes() == bytes(16)
    assert kinds.tolist() == [[0, 0]]


def test_an_error_costs_a_retelling_and_no_truth(
    start: Callable[..., tuple[Node, Subscriber]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, subscriber = start()
    send, errors = EventPublisher.send, [ZeroDivisionError("a bug")]

    def fail_once(self: EventPublisher, batch: bytes) -> None:
        if errors:
            raise errors.pop()
        send(self, batch)

    monkeypatch.setattr(EventPublisher, "send", fail_once)
    publish(node, ["a"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("a"))
    assert not errors


def test_a_subscriber_that_never_reads_costs_nobody_anything(
    start: Callable[..., tuple[Node, Subscriber]],
) -> None:
    node, subscriber = start()
    assert node.kv_events_endpoint is not None
    idle = zmq.Context()
    silent = idle.socket(zmq.SUB)
    silent.set_hwm(1)
    silent.subscribe(b"")
    silent.connect(node.kv_events_endpoint)
    for i in range(100):
        publish(node, [f"k{i}"])
    follow_until(subscriber, lambda: len(subscriber.known) == 100)
    idle.destroy(linger=0)


@pytest.mark.parametrize(
    "request_frames", [[b""], [b"", b"short"], [b"", b"x" * 8, b"more"], [b"", b"x" * 1025]]
)
def test_a_request_that_is_none_is_not_answered_and_the_next_one_is(
    start: Callable[..., tuple[Node, Subscriber]], request_frames: list[bytes]
) -> None:
    node, subscriber = start()
    assert node.kv_events_replay_endpoint is not None
    context = zmq.Context()
    rogue = context.socket(zmq.DEALER)
    rogue.connect(node.kv_events_replay_endpoint)
    rogue.send_multipart(request_frames)
    publish(node, ["a"])
    follow_until(subscriber, lambda: subscriber.known == memory_keys("a"))
    assert not rogue.poll(0)
    context.destroy(linger=0)


def test_batches_are_repeated_from_a_sequence_on_and_the_end_is_told() -> None:
    events = EventPublisher(LOOPBACK, LOOPBACK, "pages")
    events.begin(100)
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    try:
        for batch in (b"one", b"two", b"three"):
            events.send(batch)
        assert events.replay_endpoint is not None
        asking.connect(events.replay_endpoint)
        asking.send_multipart((b"", (101).to_bytes(8, "big")))
        assert not events.answer(10.0)
        got = [asking.recv_multipart() for _ in range(3)]
        assert [frames[1:] for frames in got] == [
            [b"pages", (101).to_bytes(8, "big"), b"two"],
            [b"pages", (102).to_bytes(8, "big"), b"three"],
            [b"", b"\xff" * 8, b""],
        ]
    finally:
        context.destroy(linger=0)
        events.close()


def test_a_long_replay_holds_up_no_turn_and_is_whole() -> None:
    events = EventPublisher(LOOPBACK, LOOPBACK, "")
    events.begin(100)
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.set_hwm(0)
    try:
        for _ in range(publisher.KEPT):
            events.send(b"kept")
        assert events.replay_endpoint is not None
        asking.connect(events.replay_endpoint)
        asking.send_multipart((b"", bytes(8)))
        got: list[int] = []
        n_turns = 0
        deadline = time.monotonic() + 60
        while -1 not in got:
            assert time.monotonic() < deadline, f"{len(got)} batches in a minute"
            assert not events.answer(0.01)
            n_turns += 1
            while asking.poll(0):
                got.append(int.from_bytes(asking.recv_multipart()[2], "big", signed=True))
        assert got == [*range(100, 100 + publisher.KEPT), -1]
        assert n_turns >= publisher.KEPT // publisher.REPEATED
    finally:
        context.destroy(linger=0)
        events.close()


def test_askers_who_never_read_keep_nobody_else_out_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "REPLAYS", 2)
    monkeypatch.setattr(publisher, "STUCK_S", 0.2)
    events = EventPublisher(LOOPBACK, LOOPBACK, "")
    events.begin(100)
    context = zmq.Context()
    try:
        for _ in range(publisher.KEPT):  # 40 MiB: more than the kernel takes for an asker
            events.send(bytes(20 << 10))
        assert events.replay_endpoint is not None
        deadline = time.monotonic() + 120
        silent_ones = [context.socket(zmq.DEALER) for _ in range(2)]
        for silent in silent_ones:
            silent.set_hwm(1)
            silent.connect(events.replay_endpoint)
            silent.send_multipart((b"", bytes(8)))
            while not silent.poll(0):
                assert time.monotonic() < deadline, "nobody is answered"
                events.answer(0.01)
        honest = context.socket(zmq.DEALER)
        honest.connect(events.replay_endpoint)
        honest.send_multipart((b"", (100 + publisher.KEPT - 1).to_bytes(8, "big")))
        while not honest.poll(0):
            assert time.monotonic() < deadline, "who never reads keeps the next one out"
            events.answer(0.01)
        assert honest.recv_multipart()[2] == (100 + publisher.KEPT - 1).to_bytes(8, "big")
    finally:
        context.destroy(linger=0)
        events.close()


def golden_events() -> list[messages.BlockStored | messages.BlockRemoved | messages.AllBlocksCleared]:
    keys = [bytes(range(16)), bytes(range(16, 32))]
    return [
        messages.AllBlocksCleared(),
        messages.stored(keys, messages.MEMORY),
        messages.BlockRemoved(keys[:1], messages.MEMORY),
        messages.stored(keys[:1], messages.DISK),
    ]


def test_a_batch_has_the_bytes_that_vllm_makes_of_the_same_events() -> None:
    assert messages.encode(golden_events(), 1234.5) == GOLDEN.read_bytes()


def test_numbers_are_the_ends_of_keys_and_all_else_stays() -> None:
    bare = msgspec.msgpack.decode(messages.encode(golden_events(), 1.0))
    numbered = msgspec.msgpack.decode(messages.encode(golden_events(), 1.0, messages.Hashes.NUMBERS))
    for event in bare[1]:
        if "block_hashes" in event:
            event["block_hashes"] = [int.from_bytes(key[8:], "big") for key in event["block_hashes"]]
    assert numbered == bare
    assert numbered[1][1]["block_hashes"] == [0x08090A0B0C0D0E0F, 0x18191A1B1C1D1E1F]


def test_a_node_tells_subscribers_numbers_and_followers_keys(
    start: Callable[..., tuple[Node, Subscriber]],
) -> None:
    node, _ = start(kv_events_hashes="numbers")
    followed: set[bytes] = set()
    node.follow_kv_events(lambda event, medium, keys: followed.update(keys))
    publish(node, ["a"])
    key = page_key("default", "a")
    number = int.from_bytes(key[8:], "big")
    assert node.kv_events_replay_endpoint is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(node.kv_events_replay_endpoint)
        eventually(lambda: key in followed and number in numbers_told(asking), 20.0)
    assert followed == {key}


def numbers_told(asking: zmq.Socket[bytes]) -> set[int]:
    """Return what pages are called in all that is repeated."""
    asking.send_multipart((b"", bytes(8)))
    found: set[int] = set()
    while asking.poll(10_000):
        batch = asking.recv_multipart()[-1]
        if not batch:
            break
        for event in msgspec.msgpack.decode(batch)[1]:
            found.update(event.get("block_hashes", ()))
    return found


def test_the_key_of_a_page_is_what_its_node_hashes(start: Callable[..., tuple[Node, Subscriber]]) -> None:
    node, subscriber = start(namespace="prod model=x")
    publish(node, ["page"])
    expected = {("CPU", page_key("prod model=x", b"page"))}
    follow_until(subscriber, lambda: subscriber.known == expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "kv_events must be tcp://HOST:PORT"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "which other machines can reach.*kv_events_exposed"),
        ({"kv_events": "tcp://*:5557"}, "which other machines can reach"),
        ({"kv_events_replay": LOOPBACK}, "kv_events_replay is set, but kv_events is not"),
        ({"kv_events": LOOPBACK, "pool_size": 0}, "has nothing to tell"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)  # type: ignore[arg-type]


def test_exposed_events_may_listen_anywhere() -> None:
    assert Config(kv_events="tcp://0.0.0.0:5557", kv_events_exposed=True).kv_events_exposed is True


def test_an_address_in_use_is_named(start: Callable[..., tuple[Node, Subscriber]]) -> None:
    node, _ = start()
    with pytest.raises(ConfigError, match="cannot listen on kv_events"):
        Node.start(Config(node_id="two", pool_size="1MiB", kv_events=node.kv_events_endpoint or ""))


def test_messages_are_decoded_as_they_were_made() -> None:
    batch = msgspec.msgpack.decode(messages.encode(golden_events(), 1.0), type=messages.KVEventBatch)
    assert batch.events == golden_events()
    assert batch.data_parallel_rank == 0
