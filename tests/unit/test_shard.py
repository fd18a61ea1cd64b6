"""The shard: newer entries win, stale messages change nothing, dead owners don't count."""

from __future__ import annotations

import numpy as np
import pytest

from p2pkv import _native
from p2pkv.control.wire import DROP_ENTRY, PUT_ENTRY
from p2pkv.page import ANY_GENERATION, LOCATION, Namespace

A, B = 11, 22
BOOT = 5


def key(name: str = "page") -> np.ndarray:
    return Namespace("test").hash([name])


def put(
    shard: _native.Shard, name: str = "page", *, owner: int = A, boot: int = BOOT, seq: int, gen: int
) -> int:
    entry = np.zeros(1, PUT_ENTRY)
    entry["key"] = key(name)
    entry["sequence"] = seq
    entry["location"]["owner"] = owner
    entry["location"]["boot"] = boot
    entry["location"]["generation"] = gen
    return shard.put(entry.view(np.uint8).reshape(1, -1))


def drop(shard: _native.Shard, *, owner: int = A, boot: int = BOOT, seq: int = 0, gen: int) -> None:
    entry = np.zeros(1, DROP_ENTRY)
    entry["key"] = key()
    entry["sequence"], entry["owner"], entry["boot"], entry["generation"] = seq, owner, boot, gen
    shard.drop(entry.view(np.uint8).reshape(1, -1))


def generation(shard: _native.Shard, name: str = "page") -> int | None:
    found, raw = shard.get(key(name))
    return int(raw.view(LOCATION)["generation"][0, 0]) if found[0] else None


@pytest.fixture
def shard() -> _native.Shard:
    shard = _native.Shard(1 << 16)
    shard.set_view([A, B], [BOOT, BOOT])
    return shard


def test_an_older_sequence_is_ignored(shard: _native.Shard) -> None:
    put(shard, seq=7, gen=2)
    put(shard, seq=6, gen=4)
    put(shard, seq=7, gen=6)
    assert generation(shard) == 2
    put(shard, seq=8, gen=8)
    assert generation(shard) == 8


def test_a_later_boot_wins_whatever_its_sequence(shard: _native.Shard) -> None:
    put(shard, seq=100, gen=2)
    shard.set_view([A], [BOOT + 1])
    assert generation(shard) is None
    put(shard, boot=BOOT + 1, seq=1, gen=4)
    assert generation(shard) == 4
    put(shard, boot=BOOT, seq=200, gen=6)
    assert generation(shard) == 4


def test_a_delete_names_what_it_deletes(shard: _native.Shard) -> None:
    put(shard, seq=1, gen=4)
    drop(shard, gen=2)
    drop(shard, gen=4, boot=BOOT - 1)
    drop(shard, gen=4, owner=B)
    assert generation(shard) == 4
    drop(shard, gen=4)
    assert generation(shard) is None


def test_a_late_retry_does_not_bring_a_dropped_entry_back(shard: _native.Shard) -> None:
    put(shard, seq=1, gen=4)
    drop(shard, gen=4, seq=2)
    put(shard, seq=1, gen=4)
    assert generation(shard) is None
    put(shard, seq=3, gen=6)
    assert generation(shard) == 6


def test_a_delete_of_the_owner_that_comes_late_spares_what_it_put_since(shard: _native.Shard) -> None:
    put(shard, seq=7, gen=0)
    drop(shard, gen=0, seq=5)
    assert generation(shard) == 0
    drop(shard, gen=0, seq=8)
    assert generation(shard) is None


def test_an_owner_that_looked_takes_out_whatever_it_said_before(shard: _native.Shard) -> None:
    put(shard, seq=7, gen=4)
    drop(shard, gen=ANY_GENERATION, seq=5)
    assert generation(shard) == 4
    drop(shard, gen=ANY_GENERATION, seq=8, boot=BOOT - 1)
    assert generation(shard) == 4
    drop(shard, gen=ANY_GENERATION)  # only the owner has looked, and has a sequence
    assert generation(shard) == 4
    drop(shard, gen=ANY_GENERATION, seq=8)
    assert generation(shard) is None
    put(shard, seq=7, gen=4)
    assert generation(shard) is None


def test_entries_of_nodes_outside_the_view_do_not_count(shard: _native.Shard) -> None:
    put(shard, seq=1, gen=2, owner=A)
    put(shard, seq=1, gen=4, owner=B)
    shard.set_view([B], [BOOT])
    assert generation(shard) == 4
    shard.set_view([], [])
    assert generation(shard) is None


def test_a_key_keeps_at_most_eight_owners(shard: _native.Shard) -> None:
    owners = list(range(100, 110))
    shard.set_view(owners, [BOOT] * len(owners))
    for owner in owners:
        put(shard, owner=owner, seq=1, gen=2)
    assert shard.stats()["entries"] == 8


class Holders:
    """Eleven owners of one page, of which eight have a place."""

    def __init__(self) -> None:
        self.shard = _native.Shard(1 << 16)
        owners = list(range(1, 12))
        self.shard.set_view(owners, [BOOT] * len(owners))

    def put(self, *owners: int, seq: int = 3) -> None:
        for owner in owners:
            put(self.shard, owner=owner, seq=seq, gen=8)

    def drop(self, *owners: int, seq: int = 9) -> None:
        for owner in owners:
            drop(self.shard, owner=owner, seq=seq, gen=8)

    def called(self) -> list[int]:
        return self.shard.take_called(100)[1].tolist()

    def is_kept(self, owner: int) -> bool:
        """Whether it is told that there is nothing to put."""
        at = np.zeros(1, LOCATION)
        at["owner"], at["boot"], at["generation"] = owner, BOOT, 8
        entry = _native.check_entries(key(), at.view(np.uint8).reshape(1, -1))
        return bool(self.shard.check(entry)[0])


def test_a_holder_that_was_called_in_vain_is_called_again() -> None:
    holders = Holders()
    holders.put(*range(1, 10))
    holders.drop(1)
    assert holders.called() == [9]
    holders.put(10)  # which is faster
    assert holders.is_kept(9)
    holders.drop(2)
    assert holders.called() == [9]
    holders.put(9)
    holders.drop(3, 4, 5, 6, 7, 8, 10)
    assert holders.called() == []
    assert generation(holders.shard) == 8


def test_a_holder_that_does_not_come_is_called_no_more_than_there_are_places_and_after_the_others() -> None:
    holders = Holders()
    holders.put(*range(1, 10))
    holders.drop(1)
    assert [holders.called(), holders.called()] == [[9], []]
    holders.put(10)
    holders.put(11)  # a spare one beside
    holders.drop(2)
    assert holders.called() == [11]
    holders.drop(3)
    assert holders.called() == [9]
    holders.drop(9)  # it has let the page go
    holders.put(11)
    holders.drop(4, 5, 6, 7, 8, 10, 11)
    assert holders.called() == []


def test_a_late_put_brings_nothing_back_though_another_has_had_the_place_since() -> None:
    holders = Holders()
    holders.put(*range(1, 10))
    holders.drop(1)
    holders.put(9)
    assert holders.is_kept(9)
    holders.drop(2)
    holders.put(1)  # a repeated message of before
    assert not holders.is_kept(1)
    holders.put(1, seq=10)
    assert holders.is_kept(1)


def test_owners_that_come_and_go_leave_few_entries_of_a_key() -> None:
    shard = _native.Shard(1 << 16)
    owners = list(range(1, 200))
    shard.set_view(owners, [BOOT] * len(owners))
    for owner in owners:
        put(shard, owner=owner, seq=1, gen=2)
        drop(shard, owner=owner, seq=2, gen=2)
    assert shard.stats()["tombstones"] <= 16
    for owner in owners:
        put(shard, owner=owner, seq=3, gen=4)
    assert shard.stats()["entries"] == 8


def test_a_full_shard_refuses_and_says_so() -> None:
    shard = _native.Shard(64)
    shard.set_view([A], [BOOT])
    refused = sum(put(shard, f"page-{i}", seq=1, gen=2) for i in range(500))
    assert refused == 500 - shard.stats()["entries"]
    assert refused > 0


def test_it_agrees_with_a_dict_over_random_operations(shard: _native.Shard) -> None:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model: dict[str, tuple[int, int]] = {}
    for sequence in range(1, 20_000):
        name = f"page-{rng.integers(3000)}"
        if rng.random() < 0.6:
            put(shard, name, seq=sequence, gen=2 * sequence)
            model[name] = (sequence, 2 * sequence)
        elif name in model:
            entry = np.zeros(1, DROP_ENTRY)
            entry["key"] = key(name)
            entry["sequence"], entry["owner"], entry["boot"] = sequence, A, BOOT
            entry["generation"] = model.pop(name)[1]
            shard.drop(entry.view(np.uint8).reshape(1, -1))
    names = [f"page-{i}" for i in range(3000)]
    found, raw = shard.get(Namespace("test").hash(names))
    generations = raw.view(LOCATION)["generation"][:, 0]
    assert {n: int(g) for n, f, g in zip(names, found, generations, strict=True) if f} == {
        name: generation for name, (_, generation) in model.items()
    }


def test_entries_of_strangers_are_kept_while_nobody_confirms_the_view(shard: _native.Shard) -> None:
    shard.set_time(100)
    put(shard, owner=33, seq=1, gen=2)
    for now in (*range(100, 105), *range(125, 131)):  # in between the interpreter is held
        shard.set_time(now)
        shard.confirm_view()
        for _ in range(64):  # the stripes of a shard
            shard.sweep()
    assert shard.stats()["entries"] == 1
    for now in range(131, 137):
        shard.set_time(now)
        shard.confirm_view()
    for _ in range(64):
        shard.sweep()
    assert shard.stats()["entries"] == 0
