"""What every hunt is made of."""

from __future__ import annotations

import pytest

from hunts.frame import Hunt, Tally


@pytest.mark.parametrize(("n_schedules", "missing"), [(9, []), (10, ["deaths"]), (1000, ["deaths"])])
def test_a_hunt_whose_faults_are_never_felt_is_found_out(n_schedules: int, missing: list[str]) -> None:
    hunt = Hunt("h", "p", lambda seed, tally, stop: None, effects=("hits", "deaths"), enough=10)
    assert hunt.missing(n_schedules, Tally(hits=3, deaths=0)) == missing
    assert hunt.missing(n_schedules, Tally(hits=3, deaths=1)) == []
