"""Who counts as given up of late: told of what must not be believed any more, though it is no member."""

from __future__ import annotations

import threading
from collections.abc import ValuesView
from dataclasses import replace

import pytest

from p2pkv.directory.given_up import MOST, RECENT_S, GivenUp
from p2pkv.directory.view import Member, State, View

ONE = Member("one", 17, "127.0.0.1:7400")
OTHER = Member("other", 17, "127.0.0.1:7401")
DEAD = View([replace(ONE, state=State.DEAD), OTHER])


class Times:
    now = 1000.0


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def given_up(times: Times) -> GivenUp:
    return GivenUp(lambda: times.now)


@pytest.mark.parametrize("view", [DEAD, View([OTHER])], ids=["dead", "of a registry, that knows no dead"])
def test_one_that_is_no_member_any_more_counts_for_a_while(
    given_up: GivenUp, times: Times, view: View
) -> None:
    assert given_up.recent() == []
    given_up.view_changed(view, [ONE])
    times.now += RECENT_S - 1
    assert given_up.recent() == [ONE]
    times.now += 1
    assert given_up.recent() == []


@pytest.mark.parametrize(
    "later", [replace(ONE, state=State.LEFT), replace(ONE, boot_epoch=18)], ids=["left", "restarted"]
)
def test_one_that_left_or_was_started_again_does_not(given_up: GivenUp, later: Member) -> None:
    given_up.view_changed(View([later, OTHER]), [ONE])
    assert given_up.recent() == []
    given_up.view_changed(DEAD, [ONE])
    given_up.view_changed(View([later, OTHER]), [])
    assert given_up.recent() == []


def test_one_that_comes_back_stays_until_whoever_asks_has_it_in_his_view(given_up: GivenUp) -> None:
    given_up.view_changed(DEAD, [ONE])
    given_up.view_changed(View([replace(ONE, incarnation=1), OTHER]), [])
    assert given_up.recent() == [ONE]


def test_one_that_is_given_up_again_counts_from_then_on(given_up: GivenUp, times: Times) -> None:
    given_up.view_changed(DEAD, [ONE])
    times.now += RECENT_S - 1
    again = replace(ONE, incarnation=1)
    given_up.view_changed(DEAD, [again])
    times.now += RECENT_S - 1
    assert given_up.recent() == [again]


def test_the_last_ones_of_many_count(given_up: GivenUp) -> None:
    many = [Member(f"n{i}", 17, "127.0.0.1:7402") for i in range(MOST + 10)]
    given_up.view_changed(View([OTHER]), many)
    assert given_up.recent() == many[10:]


def test_who_is_interrupted_while_he_asks_keeps_nobody_from_telling(given_up: GivenUp) -> None:
    """A signal's handler closes the node there, and waits for the thread that tells of views."""
    telling = threading.Thread(target=given_up.view_changed, args=(DEAD, [ONE]), daemon=True)
    was_kept: list[bool] = []

    class Interrupted(dict[tuple[str, int], tuple[Member, float]]):
        def values(self) -> ValuesView[tuple[Member, float]]:
            telling.start()
            telling.join(10.0)
            was_kept.append(telling.is_alive())
            return super().values()

    given_up.view_changed(DEAD, [ONE])
    given_up._members = Interrupted(given_up._members)
    assert given_up.recent() == [ONE]
    assert was_kept == [False]
