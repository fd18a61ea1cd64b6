"""Nodes in one process: what callers may get wrong, and what they are told; pages in pieces; threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import pages
from cluster import eventually
from p2pkv import (
    ClosedError,
    Config,
    ConfigError,
    Node,
    NotRegisteredError,
    Pieces,
    UsageError,
)
from pair import NBYTES, POOL, N, Pair, run_all


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The pair that all tests of this module share: what one of them gets wrong must not harm the next."""
    kept = shared_pair.publish()
    before = [len(node._parts.registrations.table.memories) for node in shared_pair.nodes]
    yield shared_pair
    assert [len(node._parts.registrations.table.memories) for node in shared_pair.nodes] == before, (
        "a registration was left over"
    )
    assert shared_pair.fetch_is_right(kept), "pages published before were lost"
    assert shared_pair.fetch_is_right(shared_pair.publish())


def refuses(call: Callable[[], object], error: type[Exception], *words: str) -> None:
    """Check that ``call`` raises exactly ``error`` and says all of ``words``, in one line."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# keys


@pytest.mark.parametrize("method", ["exists", "retract", "publish", "fetch"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], ("empty",)),
        (["a", "b", "a"], ("key 2", "'a'", "twice")),
        (["a", b"a"], ("key 1", "twice")),
        ("abc", ("not str",)),
        (b"abc", ("not bytes",)),
        (["a", 1], ("key 1",)),
        ([None], ("key 0",)),
        (["\ud800"], ("surrogates",)),
        ({"a": 1}, ("not dict",)),
        (None, ("not NoneType",)),
        pytest.param(iter(["a"]), ("not list_iterator",), id="an iterator"),
    ],
    ids=repr,
)
def test_wrong_keys_are_refused(pair: Pair, method: str, keys: object, words: tuple[str, ...]) -> None:
    rows = (
        (pair.destination[: len(keys)],)
        if isinstance(keys, (list, str, bytes, dict))
        else (pair.destination,)
    )
    arguments = rows if method in ("publish", "fetch") else ()
    refuses(lambda: getattr(pair.reader, method)(keys, *arguments), UsageError, *words)


def test_keys_may_be_text_or_bytes_of_the_same_name(pair: Pair) -> None:
    keys = pair.publish()
    assert pair.reader.exists([key.encode() for key in keys]).all()
    assert pair.reader.exists(tuple(keys)).all()
    assert pair.reader.exists(np.array(keys)).all()  # type: ignore[arg-type]


# pages


@pytest.mark.parametrize("method", ["publish", "fetch"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda memory: memory[:3], ("8 keys", "3 pages")),
        (lambda memory: memory.T[:N], ("C-contiguous rows",)),
        (lambda memory: memory[:, ::2], ("C-contiguous rows",)),
        (lambda memory: memory[:, :0], ("page 0", "no or negative length")),
        (lambda memory: np.float64(3), ("not float64",)),
        (lambda memory: np.array(3), ("C-contiguous rows",)),
        (lambda memory: memory.tolist(), ("not list",)),
        (lambda memory: None, ("not NoneType",)),
    ],
    ids=["too few", "transposed", "every second byte", "empty rows", "a number", "0-d", "a list", "none"],
)
def test_wrong_pages_are_refused(
    pair: Pair, method: str, make: Callable[[NDArray[np.uint8]], object], words: tuple[str, ...]
) -> None:
    keys = pair.fresh_keys()
    refuses(lambda: getattr(pair.reader, method)(keys, make(pair.destination)), UsageError, *words)
    assert not pair.reader.exists(keys).any()


def pieces_of(*rows: list[tuple[int, int]]) -> Pieces:
    return Pieces(np.array(rows, np.int64))


@pytest.mark.parametrize("method", ["publish", "fetch"])
def test_memory_that_is_not_registered_is_refused(pair: Pair, method: str) -> None:
    call = getattr(pair.reader, method)
    keys = pair.fresh_keys()[:2]
    at, end = pair.destination.ctypes.data, pair.destination.ctypes.data + pair.destination.nbytes
    stranger = np.zeros((2, NBYTES), np.uint8)
    refuses(lambda: call(keys, stranger), NotRegisteredError, "piece 0 of page 0", "register_memory")
    second = pieces_of([(at, 64), (at + 64, 64)], [(at + 128, 64), (stranger.ctypes.data, 64)])
    refuses(lambda: call(keys, second), NotRegisteredError, "piece 1 of page 1")
    for begin, nbytes in ((end - 63, 64), (at - 1, 64), (end, 1), (at, pair.destination.nbytes + 1)):
        partly = pieces_of([(at, 64)], [(begin, nbytes)])
        refuses(lambda partly=partly: call(keys, partly), NotRegisteredError, "page 1")
    for nbytes in (0, -1, -(2**63)):
        nothing = pieces_of([(at, 64)], [(at, nbytes)])
        refuses(lambda nothing=nothing: call(keys, nothing), UsageError, "page 1", "length")


def test_pieces_of_a_wrong_shape_are_refused() -> None:
    for array in (np.zeros((2, 2), np.int64), np.zeros((2, 1, 3), np.int64), np.zeros((2, 0, 2), np.int64)):
        refuses(lambda array=array: Pieces(array), UsageError, "(n, p, 2)")
    refuses(lambda: Pieces(np.zeros((2, 1, 2), np.int32)), UsageError, "int32")
    refuses(lambda: Pieces([[[0, 1]]]), UsageError, "not list")  # type: ignore[arg-type]


def test_a_page_larger_than_the_pool_is_refused_and_evicts_nothing(pair: Pair) -> None:
    big = np.zeros((2, 2 * POOL), np.uint8)
    with pair.owner.register_memory(big):
        refuses(
            lambda: pair.owner.publish(["big-0", "big-1"], big), UsageError, f"{2 * POOL} bytes", "pool_size"
        )
    assert not pair.reader.exists(["big-0", "big-1"]).any()


def test_another_length_than_the_published_is_refused(pair: Pair) -> None:
    keys = pair.publish()
    half = pair.destination.reshape(2 * N, NBYTES // 2)[:N]
    for node, memory in ((pair.owner, pair.source), (pair.reader, pair.destination)):
        half = memory.reshape(2 * N, NBYTES // 2)[:N]
        refuses(
            lambda node=node, half=half: node.fetch(keys, half),
            UsageError,
            f"{NBYTES} bytes",
            f"{NBYTES // 2}",
        )
    half = pair.source.reshape(2 * N, NBYTES // 2)[:N]
    refuses(lambda: pair.owner.publish(keys, half), UsageError, "page 0", "namespace")
    assert pair.fetch_is_right(keys)


def test_memory_that_may_not_be_written_is_not_written(pair: Pair) -> None:
    keys = pair.publish()
    locked = pair.destination.view()
    locked.flags.writeable = False
    refuses(lambda: pair.reader.fetch(keys, locked), UsageError, "read-only")
    overlapping = np.lib.stride_tricks.as_strided(pair.destination, (N, NBYTES), (NBYTES // 2, 1))
    refuses(lambda: pair.reader.fetch(keys, overlapping), UsageError, "overlap")
    immutable = np.frombuffer(b"\7" * N * NBYTES, np.uint8).reshape(N, NBYTES)
    with pair.reader.register_memory(immutable):
        refuses(lambda: pair.reader.fetch(keys, Pieces.of_rows(immutable)), UsageError, "read-only array")
        assert (immutable == 7).all()
        assert pair.reader.publish([f"immutable {key}" for key in keys], immutable).all()


def test_rows_may_lie_apart_and_backwards(pair: Pair) -> None:
    keys = pair.publish()
    for rows in (pair.destination[::-1], pair.destination.reshape(N // 2, 2 * NBYTES)[:, :NBYTES]):
        pair.destination[:] = 0
        outcomes = pair.reader.fetch(keys[: len(rows)], rows)
        assert outcomes.all()
        assert pages.wrong(rows, keys[: len(rows)], outcomes) == []


# registration


def test_wrong_registrations_are_refused(pair: Pair) -> None:
    register, at = pair.reader.register_memory, pair.reader.register_address
    refuses(lambda: register(pair.destination), UsageError, "overlaps")
    refuses(lambda: register(pair.destination[1:2]), UsageError, "overlaps")
    inside = pair.destination.ctypes.data + 100
    refuses(lambda: at(inside - 200, 101 + 100), UsageError, "overlaps")
    refuses(lambda: register(np.zeros(0)), UsageError, "0 bytes")
    refuses(lambda: register(np.zeros(4, np.uint8), nbytes=5), UsageError, "5 bytes of an array of 4")
    refuses(lambda: register(np.zeros(4, np.uint8), nbytes=-5), UsageError, "-5 bytes")
    refuses(lambda: register(np.zeros((4, 4)).T[:2]), UsageError, "C-contiguous")
    refuses(lambda: register(np.array([object()])), UsageError, "plain values")
    refuses(lambda: register(b"bytes"), UsageError, "numpy array")  # type: ignore[arg-type]
    for address in (0, -4096, 2**63, 2**64, 2**63 - 4):
        refuses(lambda address=address: at(address, 5), UsageError, "no process has")
    refuses(lambda: at("x", 5), UsageError, "integers")  # type: ignore[arg-type]
    refuses(lambda: at(4096, 5.5), UsageError, "integers")  # type: ignore[arg-type]


def test_neighbouring_registrations_are_allowed(pair: Pair) -> None:
    array = np.zeros(4096, np.uint8)
    with pair.reader.register_memory(array[:2048]), pair.reader.register_memory(array[2048:]):
        pass
    with pair.reader.register_memory(array):
        pass


def test_of_overlapping_registrations_at_once_one_gets_through(pair: Pair) -> None:
    array = np.zeros(4096, np.uint8)
    for _ in range(20):
        registered, barrier = [], threading.Barrier(4)

        def register(registered: list[object] = registered, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                registered.append(pair.reader.register_memory(array))
            except UsageError:
                return

        run_all([register] * 4)
        assert len(registered) == 1
        registered[0].close()  # type: ignore[attr-defined]


# time and settings


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e9, "1", True], ids=repr)
def test_a_timeout_that_is_none_is_refused(pair: Pair, timeout: float) -> None:
    keys = pair.fresh_keys()
    for call in (
        lambda: pair.reader.publish(keys, pair.destination, timeout=timeout),
        lambda: pair.reader.fetch(keys, pair.destination, timeout=timeout),
        lambda: pair.reader.exists(keys, timeout=timeout),
        lambda: pair.reader.retract(keys, timeout=timeout),
    ):
        refuses(call, UsageError, "timeout", repr(timeout))
    assert not pair.reader.exists(keys).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "0.0.0.0:0"}, ("secret_file",)),
        ({"membership": "static"}, ("join",)),
        ({"transports": ["auto", "tcp"]}, ("auto",)),
        ({"transports": ["tcpp"]}, ("tcpp",)),
        ({"pool_sise": 1 << 20}, ("pool_sise", "'pool_size'")),
        ({"pool_size": 1000}, ("pool_size", "65536")),
        ({"verify": "off"}, ("verify", "checksum")),
        ({"disk_path": "/nowhere"}, ("disk",)),
        ({"secret_file": "/nowhere/secret"}, ("/nowhere/secret",)),
    ],
    ids=lambda value: str(value),
)
def test_settings_that_make_no_node_are_refused(settings: dict[str, object], words: tuple[str, ...]) -> None:
    threads = threading.active_count()
    refuses(lambda: Node.start(Config.load(settings, environ={})), ConfigError, *words)
    assert threading.active_count() == threads


# a closed node


def test_what_is_no_configuration_is_refused_with_what_makes_one() -> None:
    with pytest.raises(ConfigError, match=r"takes a Config, not dict; Config\.load"):
        Node.start({"node_id": "n"})  # type: ignore[arg-type]


def test_every_method_of_a_closed_node_says_so(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.reader.close()
    pair.reader.close()
    keys = ["a"]
    for call in (
        lambda: pair.reader.publish(keys, pair.destination[:1]),
        lambda: pair.reader.fetch(keys, pair.destination[:1]),
        lambda: pair.reader.exists(keys),
        lambda: pair.reader.retract(keys),
        lambda: pair.reader.members(),
        lambda: pair.reader.peers(),
        lambda: pair.reader.counters(),
        lambda: pair.reader.register_memory(np.zeros(10)),
        lambda: pair.reader.register_address(4096, 10),
    ):
        refuses(call, ClosedError, "reader", "closed")
    assert pair.reader.node_id == "reader"
    assert pair.reader.address
    with pair.reader:
        pass
    pair.close()


# pages in pieces


def split(at: int, nbytes: int, n_pieces: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = [0, *sorted(rng.sample(range(1, nbytes), n_pieces - 1)), nbytes]
    return [(at + a, b - a) for a, b in pairwise(cuts)]


def test_pages_are_read_with_another_split_than_they_were_published_with(pair: Pair) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for n_published in (1, 2, 7):
        for n_fetched in (1, 3, 6):
            keys = pair.fresh_keys()
            pages.fill(pair.source, keys)
            rows = [split(row.ctypes.data, NBYTES, n_published, rng) for row in pair.source]
            assert pair.owner.publish(keys, pieces_of(*rows)).all()
            pair.destination[:] = 0
            rows = [split(row.ctypes.data, NBYTES, n_fetched, rng) for row in pair.destination]
            for node_keys in (keys, keys[::-1]):
                order = [rows[keys.index(key)] for key in node_keys]
                assert pair.reader.fetch(node_keys, pieces_of(*order)).all()
                assert pages.wrong(pair.destination, keys, np.ones(N, np.uint8)) == []


def test_pieces_may_lie_in_several_registered_memories(pair: Pair) -> None:
    thirds = [np.zeros((N, NBYTES // 4 * share), np.uint8) for share in (1, 2, 1)]
    keys = pair.publish()
    memories = [pair.reader.register_memory(third) for third in thirds]
    rows = [[(third[i].ctypes.data, third[i].nbytes) for third in thirds] for i in range(N)]
    assert pair.reader.fetch(keys, pieces_of(*rows)).all()
    assert np.array_equal(np.concatenate(thirds, axis=1), pair.source)
    other = pair.fresh_keys()
    assert pair.reader.publish(other, pieces_of(*rows)).all()
    again = pair.source.copy()
    pair.source[:] = 0
    assert pair.owner.fetch(other, pair.source).all()
    assert np.array_equal(pair.source, again)
    for memory in memories:
        memory.close()


def test_copies_end_at_the_deadline_too(tmp_path: Path) -> None:
    pair = Pair(tmp_path, pool_size="320MiB")
    try:
        memory = np.zeros((64, 4 << 20), np.uint8)
        pair.owner.register_memory(memory)
        keys = [f"large-{i}" for i in range(64)]
        assert not pair.owner.publish(keys, memory, timeout=0.001).all()  # 256 MiB: no memory is so fast
        assert pair.owner.counters()['p2pkv_unpublished_pages_total{reason="timed_out"}'] > 0
        eventually(lambda: pair.owner.publish(keys, memory, timeout=60.0).all(), 60.0)
        assert not pair.owner.fetch(keys, memory, timeout=0.001).all()
        assert pair.owner.counters()['p2pkv_missed_pages_total{reason="timed_out"}'] > 0
        assert pair.owner.fetch(keys, memory, timeout=60.0).all()
    finally:
        pair.close()


# threads


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_threads_share_nodes_while_pages_are_evicted(tmp_path: Path, transport: str) -> None:
    pair = Pair(tmp_path, transports=[transport])
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    n_hits = [0] * 8
    began = time.monotonic()

    def is_over() -> bool:
        """Say whether four seconds are over, and what was found proves something; a machine that is busy needs more."""
        seconds = time.monotonic() - began
        return seconds > 60.0 or (seconds > 4.0 and sum(n_hits) > 100)

    def work(thread: int) -> None:
        rng = random.Random(seed + thread)
        node = pair.nodes[thread % 2]
        memory = np.zeros((N, 8 * NBYTES), np.uint8)
        with node.register_memory(memory):
            while not is_over():
                # 64 batches of 256 KiB for two pools of 1 MiB: most are evicted before they are asked for
                batch = rng.randrange(64)
                keys = [f"threads-{batch}-{i}" for i in range(N)]
                if rng.random() < 0.4:
                    pages.fill(memory, keys)
                    node.publish(keys, memory)
                elif rng.random() < 0.2:
                    node.exists(keys)
                elif rng.random() < 0.1:
                    node.retract(keys)
                else:
                    outcomes = node.fetch(keys, memory)
                    n_hits[thread] += int(outcomes.sum())
                    assert pages.wrong(memory, keys, outcomes) == []

    run_all([lambda thread=thread: work(thread) for thread in range(8)])
    print(n_hits, {k: v for k, v in pair.owner.counters().items() if "missed" in k or "evict" in k})
    assert sum(n_hits) > 100
    assert sum(node.counters()["p2pkv_evicted_pages_total"] for node in pair.nodes) > 0
    pair.close()


def test_any_pool_size_will_do() -> None:
    with Node.start(Config(node_id="odd", pool_size="100001")) as node:
        assert node.counters()["p2pkv_pool_capacity_bytes"] == 25 * 4096
