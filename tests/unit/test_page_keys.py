"""Page keys: BLAKE2b as hashlib computes it, whatever path the processor takes; and who is asked for them."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from p2pkv import _native
from p2pkv.directory.ring import Ring
from p2pkv.directory.view import Member
from p2pkv.errors import UsageError
from p2pkv.page import LOCATION, Namespace

PREFIX = hashlib.blake2b(b"ns", digest_size=16).digest()


def expected(texts: list[str | bytes]) -> list[bytes]:
    raw = [text.encode() if isinstance(text, str) else text for text in texts]
    return [hashlib.blake2b(PREFIX + text, digest_size=16).digest() for text in raw]


@pytest.mark.parametrize("path", list(_native.HashPath))
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128])
def test_keys_are_blake2b_of_namespace_and_text(n: int, path: _native.HashPath) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # 112 bytes and the prefix are exactly one block; longer ones take another path.
    lengths = [0, 1, 7, 8, 64, 111, 112, 113, 128, 500]
    texts: list[str | bytes] = [rng.randbytes(rng.choice(lengths)) for _ in range(n)]
    hashed = _native.hash_keys(PREFIX, texts, path)
    assert hashed is not None
    assert [row.tobytes() for row in hashed] == expected(texts)


def test_text_is_taken_as_utf_8() -> None:
    texts: list[str | bytes] = ["page", "sélection", "頁", "x" * 200]
    hashed = _native.hash_keys(PREFIX, texts)
    assert hashed is not None
    assert [row.tobytes() for row in hashed] == expected(texts)


def test_a_namespace_makes_other_keys() -> None:
    assert (Namespace("a").hash(["page"]) != Namespace("b").hash(["page"])).any()


@pytest.mark.parametrize("keys", [[1], [None], ["\ud800"], 5])
def test_a_key_that_is_no_text_is_refused(keys: object) -> None:
    with pytest.raises(UsageError, match="keys must be"):
        Namespace("a").hash(keys)  # type: ignore[arg-type]


def _ring(n_members: int, replicas: int) -> Ring:
    members = [Member(f"node-{i}", i + 1, f"127.0.0.1:{7000 + i}") for i in range(n_members)]
    return Ring(members, replicas)


def _table(ring: Ring, own: int = -1, unhealthy: tuple[int, ...] = ()) -> _native.RingTable:
    healthy = np.array([i not in unhealthy for i in range(len(ring.members))], np.uint8)
    return _native.RingTable(ring.points, ring.successors, healthy, own)


@pytest.mark.parametrize(("n_members", "replicas"), [(1, 1), (1, 2), (3, 2), (10, 3)])
def test_those_are_asked_who_own_the_keys(n_members: int, replicas: int) -> None:
    ring = _ring(n_members, replicas)
    keys = Namespace("ring").hash([f"page-{i}" for i in range(500)])
    ask = _native.AskBatch(keys, None, _table(ring))
    records = np.arange(500, dtype=np.int64).view(np.uint8).reshape(500, 8)
    asked = {
        (row, owner)
        for index, (owner, _) in enumerate(ask.asks())
        for row in np.frombuffer(ask.body(index, records), np.int64).tolist()
    }
    owners = ring.owners(keys)
    assert asked == {(row, int(owner)) for row in range(500) for owner in owners[row] if owner >= 0}


def test_an_ask_is_settled_when_all_have_answered_and_heard_when_one_has() -> None:
    keys = Namespace("ring").hash(["page"])
    ask = _native.AskBatch(keys, None, _table(_ring(2, 2)))
    assert not ask.is_heard()
    ask.acknowledge(0)
    assert ask.is_heard()
    assert not ask.is_settled()
    assert ask.silent() == [ask.asks()[1][0]]
    ask.refuse(1)
    assert ask.is_settled()
    assert ask.answered().all()


def test_a_page_that_is_found_needs_no_second_answer() -> None:
    keys = Namespace("ring").hash(["page"])
    ask = _native.AskBatch(keys, None, _table(_ring(2, 2)))
    found, locations = np.zeros(1, np.uint8), np.zeros((1, LOCATION.itemsize), np.uint8)
    assert ask.take_found(0, b"\1" + b"\7" * LOCATION.itemsize, found, locations)
    assert ask.is_settled()
    assert found[0] == 1
    assert (locations == 7).all()


@pytest.mark.parametrize("reply", [b"", b"\1", b"\0\0", b"\1" + bytes(63), b"\0" + bytes(64)])
def test_a_reply_of_a_wrong_length_counts_as_refused(reply: bytes) -> None:
    keys = Namespace("ring").hash(["page"])
    ask = _native.AskBatch(keys, None, _table(_ring(1, 1)))
    found, locations = np.zeros(1, np.uint8), np.zeros((1, LOCATION.itemsize), np.uint8)
    assert not ask.take_found(0, reply, found, locations)
    assert found[0] == 0
    assert not ask.answered().any()
    assert ask.is_settled()


def test_the_unhealthy_are_passed_over_and_oneself_is_not_asked() -> None:
    keys = Namespace("ring").hash([f"page-{i}" for i in range(100)])
    ask = _native.AskBatch(keys, None, _table(_ring(3, 3), own=1, unhealthy=(2,)))
    assert [owner for owner, _ in ask.asks()] == [0]
    assert ask.passed_over() == [2]
    assert ask.is_heard()
