"""What schedules of several hunts are made of: a folder of their own, and steps that are drawn until the time is up."""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hunts.frame import Stop

Step = Callable[[], None]


@contextmanager
def scratch() -> Iterator[Path]:
    """Lend a schedule a folder, which goes with it; and so does what closed nodes still have open."""
    folder = Path(tempfile.mkdtemp(prefix="p2pkv-hunt-"))
    try:
        yield folder
    finally:
        gc.collect()  # nodes and pools are in circles, and what they have open goes with them
        shutil.rmtree(folder, ignore_errors=True)


def turns(most: int, stop: Stop) -> Iterator[int]:
    """Count to ``most``, not further than the time lasts; but once in any case, since no turn proves nothing."""
    for turn in range(most):
        if turn and stop():
            return
        yield turn


def drawn(chance: random.Random, steps: Sequence[tuple[Step, float]]) -> Step:
    """Return one of the steps, drawn by their weights."""
    what, weights = zip(*steps, strict=True)
    return chance.choices(what, weights)[0]
