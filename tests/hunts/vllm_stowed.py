"""A prefill instance of vLLM's connector with a buddy pool hands prompts over to decodes that are slow or dead.

As in ``vllm_unequal.py``, where decode also asks long after prefill has had its blocks back, and blocks that are given
back are wiped at once. Some schedules have a pool too small for all of it.

Oracle: as there; and where the pool has room prefill has its blocks back so soon after it offered them, whatever decode
does. Once all is over the pool is empty.
"""

from __future__ import annotations

import time
from functools import partial

from hunts.frame import Hunt, Tally
from hunts.unequal_instances import Instance, Load
from hunts.vllm_unequal import ASKS_LATE, FAULTS, RELEASED_S, World, run_in
from p2pkv.testing.lateness import Lateness

AMPLE, SCANTY = 1 << 20, 24 << 10
"""Bytes of a buddy pool: more than all that is open, and a hand-off or two."""
_LOOK_S = 0.001


class SlowWorld(World):
    """One schedule."""

    faults = FAULTS | {ASKS_LATE: 8, "never asked for": 3}

    def __init__(self, seed: int, tally: Tally, late: Lateness) -> None:
        self.buddy_pool = SCANTY if seed % 4 == 0 else AMPLE
        self.stow_after = (0.05, 0.2, 0.4)[seed % 3]
        super().__init__(seed, tally, late)

    def turn(self) -> None:
        super().turn()
        for over in self.open if self.buddy_pool == AMPLE else ():
            kept = [n for n in over.prefill.ranks if over.name in over.prefill.kept[n]]
            held = self.seen - over.offered_at - self.stow_after
            if kept and not over.prefill.is_lost and held > RELEASED_S + over.late.worst:
                raise self.broken(
                    f"{over.name} is kept by ranks {kept} of {over.prefill} {held:.2f} s too long"
                )

    def lose(self, instance: Instance) -> None:
        self.count(instance)
        super().lose(instance)

    def count(self, instance: Instance) -> None:
        """Note what an instance that is about to end has stowed."""
        if not instance.is_lost:
            counts = [node.counters() for node in instance.nodes]
            self.tally["offers stowed"] += int(sum(each["p2pkv_stowed_offers_total"] for each in counts))
            self.tally["no room"] += int(sum(each["p2pkv_unstowed_offers_total"] for each in counts))

    def judge(self, load: Load, number: int, failed: set[int] | None) -> None:
        super().judge(load, number, failed)
        if failed is None and not any(load.of.name in kept for kept in load.of.prefill.kept):
            self.tally["loads of copies"] += 1

    def check_inboxes(self) -> None:
        super().check_inboxes()
        until = time.monotonic() + RELEASED_S
        for node in self.prefill.nodes:
            while used := node.counters()["p2pkv_buddy_pool_used_bytes"]:
                if time.monotonic() > until + self.late.worst:
                    raise self.broken(f"{used:.0f} bytes of {node.node_id}'s buddy pool are nobody's")
                time.sleep(_LOOK_S)  # between two looks

    def close(self) -> None:
        for instance in self.living():
            self.count(instance)
        super().close()


HUNT = Hunt(
    name="vllm_stowed",
    promise="however slow decode is, prefill has its blocks back soon, and decode the right bytes",
    run=partial(run_in, SlowWorld),
    effects=("offers stowed", "no room", "loads of copies", "loads right", "instances lost"),
    enough=20,
)
