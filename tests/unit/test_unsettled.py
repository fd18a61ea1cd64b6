"""What an engine has told by an earlier view is remembered until its node has seen to it, and within bounds."""

from __future__ import annotations

import numpy as np

from p2pkv.attach.unsettled import MOST_KEYS, Unsettled
from p2pkv.page import Keys


def keys(first: int, n: int = 1) -> Keys:
    """Return keys that sort as their numbers do."""
    made = np.zeros((n, 16), np.uint8)
    made[:, :8] = np.arange(first, first + n, dtype=">u8").reshape(n, 1).view(np.uint8)
    return made


def numbers(taken: Keys | None) -> list[int]:
    return [] if taken is None else [int.from_bytes(bytes(key[:8]), "big") for key in taken]


def due(unsettled: Unsettled) -> list[int]:
    return numbers(unsettled.take_due())


def test_what_was_there_at_the_ask_before_is_settled() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(1))
    first = unsettled.ask()
    unsettled.add(keys(2))
    unsettled.settle(first)
    second = unsettled.ask()
    unsettled.settle(second)
    unsettled.call_due()
    assert due(unsettled) == [2], "the node may have said which view it has before it had the second"


def test_nothing_is_due_before_the_view_changes() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(1, 3))
    assert due(unsettled) == []
    unsettled.call_due()
    assert due(unsettled) == [1, 2, 3]


def test_what_is_due_is_named_twice_whatever_is_settled_meanwhile() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(1))
    unsettled.add(keys(1, 2))
    unsettled.call_due()
    for _ in range(2):
        unsettled.settle(unsettled.ask())
    assert due(unsettled) == [1, 2]
    unsettled.add(keys(3))
    for _ in range(2):
        unsettled.settle(unsettled.ask())
    assert due(unsettled) == [1, 2]
    assert due(unsettled) == []
    unsettled.call_due()
    assert due(unsettled) == [], "the third was settled"


def test_a_mark_from_before_a_change_of_the_view_settles_nothing_that_came_after() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(1))
    unsettled.ask()
    mark = unsettled.ask()
    unsettled.call_due()
    unsettled.add(keys(2))
    unsettled.settle(mark)
    unsettled.call_due()
    assert due(unsettled) == [1, 2]


def test_no_pages_are_none() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(1, 0))
    unsettled.call_due()
    assert unsettled.take_due() is None


def test_of_too_many_the_oldest_go() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(0, 10))
    unsettled.call_due()
    unsettled.add(keys(10, 10))
    unsettled.ask()
    unsettled.add(keys(20, MOST_KEYS - 15))
    unsettled.call_due()
    assert due(unsettled) == list(range(10, MOST_KEYS + 5)), "what was due was published first"
    unsettled.add(keys(MOST_KEYS + 5, 10))
    unsettled.call_due()
    assert due(unsettled) == list(range(20, MOST_KEYS + 15))
    unsettled.add(keys(0, MOST_KEYS + 5))
    unsettled.call_due()
    assert due(unsettled) == list(range(5, MOST_KEYS + 5)), "a batch that is too long by itself"


def test_what_goes_for_want_of_room_does_not_move_the_marks() -> None:
    unsettled = Unsettled()
    unsettled.add(keys(0, 10))
    unsettled.ask()
    unsettled.add(keys(10, MOST_KEYS - 5))
    unsettled.settle(unsettled.ask())
    unsettled.call_due()
    assert due(unsettled) == list(range(10, MOST_KEYS + 5)), "the first has gone, and was all before the mark"
