"""Which reader's pages come first, and what goes for them."""

from __future__ import annotations

import random

from p2pkv.cache.hot_readers import Finds, Parts, collect


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def found(numbers: range, rate: float) -> dict[bytes, float]:
    return {key(number): rate for number in numbers}


def finds_of(*by_reader: dict[bytes, float]) -> Finds:
    return Finds(by_reader, [page for rates in by_reader for page in rates])


def test_readers_have_turns_and_what_each_finds_most_comes_first() -> None:
    finds = finds_of({key(1): 1.0, key(2): 3.0, key(3): 0.1}, {key(8): 900.0, key(9): 1000.0, key(2): 1.0})
    assert finds.hot(0.5) == [key(2), key(9), key(1), key(8)]
    assert finds.rate(key(2)) == 4.0
    assert finds.readers(key(2)) == 0b11


def test_what_was_seen_too_seldom_is_not_hot() -> None:
    own = [(key(1), 2.0), (key(2), 2.0)]
    finds = collect(
        lambda _, least: own[:1] if least > 1 else own,
        lambda *_: [(7, [(key(3), 2.0, 3), (key(4), 2.0, 4)]), (9, [(key(3), 2.0, 1)])],
        least_looks=4,
        least_rate=0.25,
    )
    assert set(finds.hot(0.5)) == {key(1), key(3), key(4)}
    assert finds.rate(key(2)) == 2.0, "what is here stays all the same"
    assert finds.n_by_engines == 2


def test_a_single_reader_has_all_of_the_room_for_what_it_finds_most() -> None:
    finds = finds_of(found(range(4), 1.0) | {key(9): 3.0, key(8): 1.5})
    parts = Parts(finds, dict.fromkeys(map(key, range(4)), 10), 40)
    wanted = parts.in_turn(finds.hot(0.5), 10)
    going, coming = parts.make_room([page for page in wanted if page in (key(8), key(9))], 0, 10, 10)
    assert coming == [key(9)]
    assert len(going) == 1


def test_whose_part_is_not_used_takes_what_others_have_beyond_theirs() -> None:
    finds = finds_of(found(range(10), 1000.0), found(range(100, 103), 0.5))
    parts = Parts(finds, dict.fromkeys(map(key, range(8)), 10), 80)
    wanted = parts.in_turn([key(8), key(9), key(100), key(101), key(102)], 10)
    assert wanted == [key(100), key(101), key(102), key(8), key(9)]
    going, coming = parts.make_room(wanted, 0, 10, 10)
    assert coming == [key(100), key(101), key(102)]
    assert len(going) == 3


def test_what_several_find_stays_as_long_as_it_fits_the_part_of_one() -> None:
    liar, honest = found(range(50), 1e9), found(range(3), 1.0)
    parts = Parts(finds_of(liar, honest), dict.fromkeys(map(key, range(6)), 10), 60)
    going, _ = parts.make_room(parts.in_turn(list(map(key, range(6, 50))), 10), 0, 10, 100)
    assert not set(going) & set(honest)


def test_no_reader_loses_what_fits_its_part_whatever_others_say() -> None:
    chance = random.Random(1)
    for _ in range(300):
        n_readers, room = chance.randint(1, 5), chance.randint(4, 40)
        by_reader = [
            {key(chance.randrange(60)): 10 ** chance.uniform(-1, 9) for _ in range(chance.randint(1, 40))}
            for _ in range(n_readers)
        ]
        finds = finds_of(*by_reader)
        pages = list(finds.rates)
        chance.shuffle(pages)
        sizes = {page: chance.randint(1, 3) for page in pages}
        guests: dict[bytes, int] = {}
        for page in pages:
            if sum(guests.values()) + sizes[page] <= room and chance.random() < 0.7:
                guests[page] = sizes[page]
        parts = Parts(finds, guests, room)
        wanted = parts.in_turn([page for page in finds.hot(0.0) if page not in guests], 3)
        free = room - sum(guests.values())
        going, coming = parts.make_room(wanted, free, 3, chance.randint(0, 60))
        assert len(set(going)) == len(going)
        assert set(going) <= guests.keys()
        assert 3 * len(coming) <= free + sum(guests[page] for page in going)
        for rates in by_reader:
            used = 0
            for page in sorted(rates.keys() & guests.keys(), key=rates.__getitem__, reverse=True):
                used += guests[page]
                if used > room // n_readers:
                    break
                if page in going:  # then for what is found by the same reader, and twice as often
                    assert any(
                        other in rates and finds.rate(other) >= 2 * finds.rate(page) for other in coming
                    )
