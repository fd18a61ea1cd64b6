"""Whom a drain expects back: who left within the last minute or is about to, had a pool, and is not there again."""

from __future__ import annotations

import time

import pytest

from p2pkv.cache import departures
from p2pkv.cache.departures import Departures
from p2pkv.directory.view import Member

AT = "127.0.0.1:1"
A, B = Member("a", 1, AT), Member("b", 1, AT)


def expects(known: Departures) -> bool:
    """Say whether a drain would wait; one that has no time left never does."""
    known.wait(time.monotonic() - 1.0)
    return known._is_expecting()


def test_who_left_is_expected_until_it_is_back() -> None:
    known = Departures()
    known.view_changed([A, B], [])
    assert not expects(known)
    known.view_changed([A], [B])
    assert expects(known)
    known.view_changed([A, Member("b", 2, AT)], [])
    assert not expects(known)


def test_who_was_restarted_before_anybody_noticed_is_back() -> None:
    known = Departures()
    known.view_changed([Member("a", 2, AT)], [A])
    assert not expects(known)


def test_who_drains_is_expected_and_who_takes_nothing_over_is_not() -> None:
    known = Departures()
    known.view_changed([A, Member("b", 1, AT, weight=0.0, is_draining=True)], [])
    assert expects(known)
    known.view_changed([A], [Member("b", 1, AT, weight=0.0, is_draining=True)])
    assert expects(known)
    without_a_pool = Departures()
    without_a_pool.view_changed([A], [Member("guest", 1, AT, weight=0.0)])
    assert not expects(without_a_pool)


def test_nobody_is_expected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Departures()
    known.view_changed([A], [B])
    monkeypatch.setattr(departures, "RECENT_S", -1.0)
    assert not expects(known)


def test_of_many_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "_MOST", 2)
    known = Departures()
    known.view_changed([], [A, B])
    known.view_changed([], [Member("c", 1, AT), A])
    assert list(known._left_at) == ["c", "a"]
