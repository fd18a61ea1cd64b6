"""Every hunt, for some seconds and with fixed seeds: `make test-hunts` runs them for longer and with others."""

from __future__ import annotations

import pytest

from hunts.__main__ import Run
from hunts.found import hunts

FIRST_SEED = 1
SECONDS = 5.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(hunts()))
def test_the_promise_holds(name: str) -> None:
    run = Run(hunts()[name], FIRST_SEED, SECONDS, replay=False)
    run.to_the_end()
    print(run.last)
    assert not run.is_broken, run.story()
    assert sum(run.last["tally"].values()) > 0, "a hunt that checks nothing proves nothing"
