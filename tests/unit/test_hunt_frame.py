"""What every hunt is made of."""

from __future__ import annotations

import pytest

from hunts.__main__ import last_words
from hunts.frame import Hunt, Tally


@pytest.mark.parametrize(("n_schedules", "missing"), [(9, []), (10, ["deaths"]), (1000, ["deaths"])])
def test_a_hunt_whose_faults_are_never_felt_is_found_out(n_schedules: int, missing: list[str]) -> None:
    hunt = Hunt("h", "p", lambda seed, tally, stop: None, effects=("hits", "deaths"), enough=10)
    assert hunt.missing(n_schedules, Tally(hits=3, deaths=0)) == missing
    assert hunt.missing(n_schedules, Tally(hits=3, deaths=1)) == []


def test_of_a_crash_the_thread_that_crashed_is_told() -> None:
    others = "\n\n".join(f"Thread {i} (most recent call first):\n  File x" for i in range(999))
    crashed = "Current thread 7 (most recent call first):\n  File y"
    said = (
        f"Fatal Python error: Segmentation fault\n\n{others}\n\n{crashed}\n\n{others}\n\nExtension modules: z"
    )
    told = last_words(said)
    assert told.startswith(crashed)
    assert told.endswith("Extension modules: z")
    assert len(told) < len(said) / 4
    assert last_words(crashed) == crashed


@pytest.mark.parametrize(("can", "missing"), [(True, ["devices"]), (False, [])])
def test_what_this_machine_cannot_have_is_not_missed(can: bool, missing: list[str]) -> None:
    hunt = Hunt("h", "p", lambda *_: None, effects=("devices",), only_where={"devices": lambda: can})
    assert hunt.missing(50, Tally()) == missing
