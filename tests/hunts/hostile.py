"""A member who has the secret and says anything at all, beside honest nodes: what they have is right, or not there.

Each front is a module of its own with an ``attack(rng, tally, stop)``, which starts honest nodes, attacks them, checks
what they have, and raises `Broken`. A new one is added to `FRONTS`.
"""

from __future__ import annotations

import gc
import random

from hunts import hostile_control, hostile_frames, hostile_links
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.testing.lateness import Lateness

FRONTS = {
    "control": hostile_control.attack,
    "frames": hostile_frames.attack,
    "links": hostile_links.attack,
}

EFFECTS = ("hostile messages", "links cut", "messages of members", "visits of readers", "honest fetches")
EFFECTS += ("honest reads", "rows right")


def run(seed: int, tally: Tally, stop: Stop) -> None:
    rng = random.Random(seed)
    front = sorted(FRONTS)[seed % len(FRONTS)]
    broken: Broken | None = None
    Lateness()  # its process and file stay: they must be there before levels are taken, whichever front is first
    try:
        FRONTS[front](rng, tally, stop)
    except Broken as found:
        broken = Broken(f"{front}: {found}")
    gc.collect()  # nodes are in cycles, and keep their descriptors until those are found
    if broken is not None:
        raise broken


HUNT = Hunt(
    "hostile",
    "a member that says anything harms nobody's rows, and no node crashes or hangs",
    run,
    effects=EFFECTS,
)
