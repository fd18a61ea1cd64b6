"""The pool against a dictionary: whatever is published, fetched, pinned, retracted and purged, in any order.

The model needs no idea of what the pool ought to evict: every page that goes is reported, so that what was
stored, less what was reported, retracted or purged, is exactly what must be there.
"""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from p2pkv.page import LOCATION, Keys
from p2pkv.pool import FetchStatus, Locations, Pieces, Pool, PoolStatus

GRANULE = 64
NAMES = 40

names = st.lists(st.integers(0, NAMES - 1), min_size=1, max_size=6, unique=True)


def keys_of(chosen: list[int]) -> Keys:
    keys = np.random.default_rng(99).integers(0, 256, (NAMES, 16), np.uint8)
    return keys[chosen]


def page_of(name: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(name).integers(0, 256, nbytes, np.uint8)


def pieces_of(pages: list[NDArray[np.uint8]]) -> Pieces:
    """Two pieces a page, cut at a third of it."""
    cuts = [len(page) // 3 for page in pages]
    rows = [
        [[page.ctypes.data, cut], [page.ctypes.data + cut, len(page) - cut]]
        for page, cut in zip(pages, cuts, strict=True)
    ]
    return np.array(rows, np.int64).reshape(len(pages), 2, 2)


def block_of(nbytes: int) -> int:
    """The size of the block that a page of this length takes up."""
    return -(-nbytes // GRANULE) * GRANULE


class PoolMachine(RuleBasedStateMachine):
    """``pages`` is what must be there; ``ghosts`` the blocks of pages that went while pinned, by ticket."""

    @initialize(n_granules=st.integers(1, 50))
    def make(self, n_granules: int) -> None:
        self.n_granules = n_granules
        self.pool = Pool(n_granules * GRANULE, owner=1, boot=2, granule=GRANULE)
        self.pages: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.ghosts: dict[int, tuple[int, int]] = {}
        address = self.pool.address + self.pool.words_offset
        self.words = np.ctypeslib.as_array((ctypes.c_uint64 * n_granules).from_address(address))
        self.words_before = self.words.copy()
        self.all_names = {key.tobytes(): name for name, key in enumerate(keys_of(list(range(NAMES))))}

    def name_of(self, key: NDArray[np.uint8]) -> int:
        return self.all_names[key.tobytes()]

    def locate(self, chosen: list[int]) -> Locations:
        return self.pool.lookup(keys_of(chosen))[1]

    def forget_evicted(self) -> list[int]:
        keys, locations = self.pool.drain_evicted(1000, 0.0)
        gone = [self.name_of(key) for key in keys]
        for name, length in zip(gone, locations["length"], strict=True):
            assert self.pages.pop(name) == length
        return gone

    @rule(chosen=names, lengths=st.lists(st.integers(1, 9 * GRANULE), min_size=6, max_size=6))
    def publish(self, chosen: list[int], lengths: list[int]) -> None:
        pages = [page_of(name, nbytes) for name, nbytes in zip(chosen, lengths, strict=False)]
        was_pinned = set(self.pins.values())
        statuses, locations, *_ = self.pool.publish(keys_of(chosen), pieces_of(pages))
        other_length = [
            name in self.pages and self.pages[name] != len(page)
            for name, page in zip(chosen, pages, strict=True)
        ]
        if any(other_length):
            self.is_refused(chosen, statuses, other_length)
            return
        gone = self.forget_evicted()  # perhaps the back of this very batch, which is then stored anew or not
        before = dict(self.pages)
        assert not was_pinned.intersection(gone)
        is_full = False
        for name, page, status, location in zip(chosen, pages, statuses, locations, strict=True):
            if name in before:
                assert status == PoolStatus.EXISTS
                assert location["length"] == before[name]
            elif block_of(len(page)) > GRANULE * self.n_granules:
                assert status == PoolStatus.TOO_LARGE
            elif status == PoolStatus.STORED:
                assert not is_full  # the front of a batch is kept, not picked from
                self.pages[name] = len(page)
            else:
                assert status == PoolStatus.NO_ROOM
                is_full = True
            is_there = status not in (PoolStatus.NO_ROOM, PoolStatus.TOO_LARGE)
            assert bool(location["flags"]) == is_there

    def is_refused(self, chosen: list[int], statuses: NDArray[np.uint8], other_length: list[bool]) -> None:
        """A batch with a page of another length stores and evicts nothing."""
        for name, status, is_other in zip(chosen, statuses, other_length, strict=True):
            there = PoolStatus.EXISTS if name in self.pages else PoolStatus.NOT_TRIED
            assert status == (PoolStatus.OTHER_LENGTH if is_other else there)
        assert not self.forget_evicted()

    @rule(chosen=names, cut=st.sampled_from([0, 0, 0, 1]))
    def fetch(self, chosen: list[int], cut: int) -> None:
        lengths = [self.pages.get(name, 10 + cut) - cut for name in chosen]
        out = [np.zeros(nbytes, np.uint8) for nbytes in lengths]
        statuses = self.pool.fetch(keys_of(chosen), pieces_of(out))
        for name, page, status in zip(chosen, out, statuses, strict=True):
            if name not in self.pages:
                assert status == FetchStatus.MISS
            elif cut:
                assert status == FetchStatus.OTHER_LENGTH
            else:
                assert status == FetchStatus.HIT
                assert (page == page_of(name, len(page))).all()

    @rule(chosen=names)
    def retract(self, chosen: list[int]) -> None:
        was_there, locations = self.pool.retract(keys_of(chosen))
        for name, there, location in zip(chosen, was_there, locations, strict=True):
            assert bool(there) == (name in self.pages)
            if there:
                self.haunt(name, int(location["offset"]))
                del self.pages[name]

    def haunt(self, name: int, offset: int) -> None:
        for ticket in [ticket for ticket, pinned in self.pins.items() if pinned == name]:
            del self.pins[ticket]
            self.ghosts[ticket] = (offset, block_of(self.pages[name]))

    @rule(chosen=names)
    def pin(self, chosen: list[int]) -> None:
        found, tickets, locations = self.pool.pin(keys_of(chosen), 1000.0)
        assert locations[found == 1].tolist() == self.locate(chosen)[found == 1].tolist()
        for name, there, ticket in zip(chosen, found, tickets, strict=True):
            assert bool(there) == bool(ticket)
            if there:
                assert name in self.pages
                self.pins[int(ticket)] = name

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = sorted([*self.pins, *self.ghosts])
        ticket = data.draw(st.sampled_from(held)) if held else 12345
        expected = [int(bool(held)), 0]
        assert [int(self.pool.unpin(np.array([ticket], np.uint64))[0]) for _ in range(2)] == expected
        self.pins.pop(ticket, None)
        self.ghosts.pop(ticket, None)

    @rule()
    def purge(self) -> None:
        keys, locations, _ = self.pool.list(0, 1000)
        for key, location in zip(keys, locations, strict=True):
            self.haunt(self.name_of(key), int(location["offset"]))
        assert self.pool.purge() == len(self.pages)
        self.forget_evicted()
        assert not self.pages
        if not self.ghosts:
            self.check_all_blocks_merged()

    def check_all_blocks_merged(self) -> None:
        """The largest page that ever fits must fit now; it leaves again, for the next rule."""
        page = page_of(0, GRANULE * self.n_granules)
        assert self.pool.publish(keys_of([0]), pieces_of([page]))[0].tolist() == [PoolStatus.STORED]
        assert self.pool.retract(keys_of([0]))[0].tolist() == [1]
        assert self.pool.stats()["used"] == 0

    @invariant()
    def the_pages_are_those_of_the_model_with_their_bytes(self) -> None:
        found, locations = self.pool.lookup(keys_of(list(range(NAMES))))
        assert {name for name in range(NAMES) if found[name]} == set(self.pages)
        for name, nbytes in self.pages.items():
            at = self.pool.address + int(locations[name]["offset"])
            stored = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at))
            assert (stored == page_of(name, nbytes)).all()

    @invariant()
    def words_are_even_at_first_blocks_of_pages_only_and_only_grow(self) -> None:
        locations = self.locate(sorted(self.pages)) if self.pages else np.zeros(0, LOCATION)
        first_blocks = (locations["offset"] - self.pool.data_offset) // GRANULE
        assert (locations["word_offset"] == self.pool.words_offset + first_blocks * 8).all()
        words = self.words.copy()
        even = np.flatnonzero(words % 2 == 0)
        assert even.tolist() == sorted(first_blocks.tolist())
        assert (words[first_blocks.astype(np.int64)] == locations["generation"]).all()
        assert (words >= self.words_before).all()
        self.words_before = words

    @invariant()
    def blocks_never_overlap_and_none_is_lost(self) -> None:
        blocks = set(self.ghosts.values())
        for name in self.pages:
            blocks.add((int(self.locate([name])[0]["offset"]), block_of(self.pages[name])))
        end = self.pool.data_offset
        for offset, nbytes in sorted(blocks):
            assert offset >= end
            end = offset + nbytes
        assert end <= self.pool.nbytes
        stats = self.pool.stats()
        assert stats["used"] == sum(nbytes for _, nbytes in blocks)
        assert stats["pages"] == len(self.pages)


# Hypothesis prints the failing steps and how to replay them.
PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_the_pool_keeps_its_promises = PoolMachine.TestCase
