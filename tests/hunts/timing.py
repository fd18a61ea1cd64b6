"""Whether a call ended in time, on a machine that may be busy."""

from __future__ import annotations

import time

from hunts.frame import Broken
from p2pkv.testing.lateness import Lateness

_LOOK_AGAIN_S = 0.02


def check_time(what: str, seconds: float, late: Lateness) -> None:
    """Raise `Broken` if what has just ended took longer than that, but for what ``late`` says of the machine."""
    took = late.seconds
    if took > seconds + late.worst:
        time.sleep(_LOOK_AGAIN_S)  # whoever watches the machine stood still as well, and has not noted it yet
    if took > seconds + late.worst:
        raise Broken(f"{what} took {took:.3f} s instead of {seconds:.3f} s; the machine was {late}")
