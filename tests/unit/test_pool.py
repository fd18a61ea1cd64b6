"""The pool as Python sees it; the native tests and the property tests go deeper."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.page import LOCATION, RESIDENT, Keys, as_bytes, as_locations
from p2pkv.pool import FetchStatus, Pieces, Pool, PoolStatus

PAGE = 8192


def make_pool(n_pages: int = 4, **options: int) -> Pool:
    return Pool(n_pages * PAGE, owner=11, boot=12, region=13, **options)


def keys_of(*names: int) -> Keys:
    digests = [hashlib.blake2b(str(name).encode(), digest_size=16).digest() for name in names]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(names), 16)


def pages_of(*names: int, nbytes: int = PAGE) -> NDArray[np.uint8]:
    """Random bytes, the same for the same name."""
    return np.stack([np.random.default_rng(name).integers(0, 256, nbytes, np.uint8) for name in names])


def pieces_of(memory: NDArray[np.uint8], n_pieces: int = 2) -> Pieces:
    """Cut each row of ``memory`` into ``n_pieces`` equal pieces."""
    n_pages, nbytes = memory.shape
    pieces = np.empty((n_pages, n_pieces, 2), np.int64)
    pieces[:, :, 1] = nbytes // n_pieces
    starts = np.arange(n_pages)[:, None] * nbytes + np.arange(n_pieces) * (nbytes // n_pieces)
    pieces[:, :, 0] = memory.ctypes.data + starts
    return pieces


def publish(pool: Pool, *names: int) -> list[int]:
    memory = pages_of(*names)
    statuses, *_ = pool.publish(keys_of(*names), pieces_of(memory))
    return [int(status) for status in statuses]


def found(pool: Pool, *names: int) -> list[int]:
    return [int(is_there) for is_there in pool.lookup(keys_of(*names))[0]]


def test_a_published_page_is_fetched_however_its_bytes_are_cut() -> None:
    pool = make_pool()
    memory = pages_of(1, 2)
    statuses, locations, *_ = pool.publish(keys_of(1, 2), pieces_of(memory, n_pieces=4))
    assert statuses.tolist() == [PoolStatus.STORED, PoolStatus.STORED]
    out = np.zeros((3, PAGE), np.uint8)
    statuses = pool.fetch(keys_of(1, 3, 2), pieces_of(out, n_pieces=1))
    assert statuses.tolist() == [FetchStatus.HIT, FetchStatus.MISS, FetchStatus.HIT]
    assert (out[[0, 2]] == memory).all()
    assert not out[1].any()
    assert locations.dtype == LOCATION
    assert locations["length"].tolist() == [PAGE, PAGE]
    assert locations["checksum"].tolist() == _native.checksum_pages(pieces_of(memory)).tolist()


def test_a_location_leads_to_the_bytes_and_to_the_word_that_vouches_for_them() -> None:
    pool = make_pool()
    memory = pages_of(5)
    _, locations, *_ = pool.publish(keys_of(5), pieces_of(memory))
    location = locations[0]
    assert (location["owner"], location["boot"], location["region"]) == (11, 12, 13)
    assert location["flags"] == RESIDENT
    copy, word = np.zeros(PAGE, np.uint8), np.zeros(1, np.uint64)
    _native.copy_pieces(np.array([[copy.ctypes.data, pool.address + int(location["offset"]), PAGE]]))
    _native.copy_pieces(np.array([[word.ctypes.data, pool.address + int(location["word_offset"]), 8]]))
    assert (copy == memory[0]).all()
    assert word[0] == location["generation"]
    pool.retract(keys_of(5))
    _native.copy_pieces(np.array([[word.ctypes.data, pool.address + int(location["word_offset"]), 8]]))
    assert word[0] != location["generation"]


def test_publish_says_what_became_of_each_page() -> None:
    pool = make_pool(4)
    assert publish(pool, 1) == [PoolStatus.STORED]
    other_length = pages_of(1, nbytes=PAGE // 2)
    assert pool.publish(keys_of(1), pieces_of(other_length))[0].tolist() == [PoolStatus.OTHER_LENGTH]
    too_large = pages_of(9, nbytes=4 * PAGE + 2)
    assert pool.publish(keys_of(9), pieces_of(too_large))[0].tolist() == [PoolStatus.TOO_LARGE]
    assert publish(pool, 2, 1, 3, 4, 5, 6) == [
        PoolStatus.STORED,
        PoolStatus.EXISTS,
        PoolStatus.STORED,
        PoolStatus.STORED,
        PoolStatus.NO_ROOM,
        PoolStatus.NO_ROOM,
    ]
    assert pool.stats()["no_room_pages"] == 2


def test_the_page_used_longest_ago_is_evicted_and_reported_with_its_location() -> None:
    pool = make_pool(2)
    publish(pool, 1)
    publish(pool, 2)
    _, before = pool.lookup(keys_of(2))
    publish(pool, 1)
    publish(pool, 3)
    assert found(pool, 1, 2, 3) == [1, 0, 1]
    keys, locations = pool.drain_evicted(10, 0.0)
    assert (keys == keys_of(2)).all()
    assert locations.tolist() == before.tolist()
    assert pool.drain_evicted(10, 0.0)[1].shape == (0,)


def test_a_pinned_page_stays_until_unpin_or_the_end_of_its_lease() -> None:
    pool = make_pool(1, pinned_limit=PAGE)
    publish(pool, 1)
    is_pinned, tickets, locations = pool.pin(keys_of(1, 2), 60.0)
    assert is_pinned.tolist() == [1, 0]
    assert locations[0] == pool.lookup(keys_of(1))[1][0]
    assert publish(pool, 3) == [PoolStatus.NO_ROOM]
    assert pool.unpin(tickets).tolist() == [1, 0]
    assert pool.unpin(tickets).tolist() == [0, 0]
    assert publish(pool, 3) == [PoolStatus.STORED]
    _, tickets, _ = pool.pin(keys_of(3), 0.0)
    assert publish(pool, 4) == [PoolStatus.STORED]
    assert pool.unpin(tickets).tolist() == [0]


def test_list_and_purge_see_all_pages() -> None:
    pool = make_pool(8)
    publish(pool, *range(6))
    listed, cursor = set(), 0
    while True:
        keys, locations, cursor = pool.list(cursor, 4)
        assert len(keys) == len(locations) <= 4
        listed |= {key.tobytes() for key in keys}
        if cursor == 0:
            break
    assert listed == {key.tobytes() for key in keys_of(*range(6))}
    assert pool.purge() == 6
    assert pool.stats()["used"] == pool.stats()["pages"] == 0


def test_close_wakes_whoever_waits_for_evictions() -> None:
    pool = make_pool()
    drained: list[int] = []
    waiting = threading.Thread(target=lambda: drained.append(len(pool.drain_evicted(10, 60.0)[0])))
    waiting.start()
    pool.close()
    waiting.join(30.0)
    assert drained == [0]


def test_two_publishers_of_one_key_both_succeed_and_one_copy_stays() -> None:
    pool = make_pool(64)
    memory = pages_of(*range(16))
    statuses: list[list[int]] = []

    def publish_all() -> None:
        statuses.append(pool.publish(keys_of(*range(16)), pieces_of(memory))[0].tolist())

    threads = [threading.Thread(target=publish_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for one in statuses for status in one} <= {PoolStatus.STORED, PoolStatus.EXISTS}
    assert sum(one.count(PoolStatus.STORED) for one in statuses) == 16
    assert pool.stats()["pages"] == 16
    assert pool.stats()["used"] == 16 * PAGE


@pytest.mark.parametrize(
    ("keys", "pieces", "named"),
    [
        (np.zeros((1, 15), np.uint8), np.zeros((1, 1, 2), np.int64), "keys"),
        (np.zeros((1, 16), np.int8), np.zeros((1, 1, 2), np.int64), "keys"),
        (np.zeros((2, 32), np.uint8)[:, ::2], np.zeros((2, 1, 2), np.int64), "keys"),
        (np.zeros((1, 16), np.uint8), np.zeros((1, 2), np.int64), "pieces"),
        (np.zeros((1, 16), np.uint8), np.zeros((1, 1, 2), np.uint64), "pieces"),
        (np.zeros((1, 16), np.uint8), np.zeros((2, 1, 2), np.int64), "keys and pieces"),
        (np.zeros((1, 16), np.uint8), np.full((1, 1, 2), -1, np.int64), "pieces"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused_by_name(
    keys: NDArray[np.uint8], pieces: NDArray[np.int64], named: str
) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match=named):
        pool.publish(keys, pieces)
    with pytest.raises(ValueError, match=named):
        pool.fetch(keys, pieces)
    assert pool.stats()["used"] == 0


def test_read_only_arrays_and_empty_batches_are_welcome() -> None:
    pool = make_pool()
    keys = keys_of(1)
    keys.flags.writeable = False
    assert pool.lookup(keys)[0].tolist() == [0]
    nothing, no_pieces = np.zeros((0, 16), np.uint8), np.zeros((0, 2, 2), np.int64)
    statuses, locations, *_ = pool.publish(nothing, no_pieces)
    assert statuses.shape == locations.shape == (0,)
    assert pool.pin(nothing, 1.0)[1].shape == (0,)


def test_impossible_sizes_are_a_configuration_error_that_names_them() -> None:
    with pytest.raises(ConfigError, match="4097"):
        Pool(4097, owner=1, boot=1)
    with pytest.raises(ConfigError, match="granule"):
        Pool(4096, owner=1, boot=1, granule=63)
    with pytest.raises(ConfigError, match="memory"):
        Pool(2**50, owner=1, boot=1, granule=2**30)


def test_locations_become_bytes_and_back() -> None:
    locations = np.zeros(3, LOCATION)
    locations["offset"] = [1, 2, 3]
    raw = as_bytes(locations)
    assert raw.shape == (3, 64)
    assert as_locations(raw).tolist() == locations.tolist()
    assert as_bytes(locations[::2]).shape == (2, 64)
