"""What a run of hosts has beside faults: bumps, changes of the secret, and what a host that drained owes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from . import faults, host_schedule
from .driver import Driver
from .hosts import Hosts
from .load import BUMP_S, N_HOT
from .schedule import Event, Round

_HUSH_S = 2.0
"""How long engines may take to publish no more; if one is stopped or held for as long there is no bump."""
_ENDING_S, _STARTING_S = 30.0, 60.0
"""How long a process may take to end, and to be up again, while the secret is changed."""
_STEP_S = 0.02
_HEARD_S = 3.0
"""By then whoever did not hear of a bump has heard of it, once he answers again: a second or two."""


class HostDriver(Driver):
    """Plays rounds on hosts."""

    _fleet: Hosts

    def __init__(self, fleet: Hosts, seed: int, kinds: Collection[str], *, keep_going: bool) -> None:
        engines = [fleet.names[number] for number in fleet.loaded]
        rounds = host_schedule.rounds(seed, fleet.names, fleet.n_hosts, kinds)
        super().__init__(fleet, rounds, keep_going=keep_going, kept=engines)
        self._n_asked = 0
        self._is_half_heard = False
        """Whether somebody hears of a bump later than its caller was told."""

    def _play(self, events: Round) -> float:
        since = super()._play(events)
        # A node that ends before it has found its new keeper takes its pages along, and so must not end yet.
        if not self._fleet.are_kept():
            if not self._until(self._fleet.are_kept, _STARTING_S):
                self.oracle.broken.append(
                    f"a keeper has not got its host's memory again within {_STARTING_S:g} s"
                )
            since = time.monotonic()
        if self._is_half_heard:
            # what was published where a bump had not been heard of is taken back when it is
            self.wait(_HEARD_S)
            self._forget()
        self._judge_drains(alone=[event.kind for event in events] == ["drain"])
        return since

    def _forget(self) -> None:
        """Have engines take nothing for published any more, and publish it again."""
        self._is_half_heard = False
        for number in self._fleet.loaded:
            self._fleet.tell(number, do="forget")

    def _begin(self, event: Event) -> faults.Undo:
        if event.kind == "bump":
            self._bump(event.nodes[0])
            return _nothing
        if event.kind == "rotate":
            self._rotate()
            return _nothing
        return super()._begin(event)

    def _until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                return False
            self.wait(_STEP_S)
        return True

    def _has_answered(self, numbers: Collection[int], ask: int) -> bool:
        return all(self.oracle.past[self._fleet.names[number]].answered == ask for number in numbers)

    def _ask(self, numbers: Collection[int], what: str) -> int:
        self._n_asked += 1
        for number in numbers:
            self._fleet.tell(number, do=what, id=self._n_asked)
        return self._n_asked

    def _bump(self, engine: int) -> None:
        """Have all engines hush, one of them bump, and all go on."""
        engines = self._fleet.loaded
        hushed = self._ask(engines, "hush")
        if self._until(lambda: self._has_answered(engines, hushed), _HUSH_S):
            heard = self.oracle.tally["bump hits"]
            bumped = self._ask([engine], "bump")
            self._until(lambda: self._has_answered([engine], bumped), BUMP_S + _HUSH_S)
            self._is_half_heard = self.oracle.tally["bump hits"] == heard
        else:
            self.oracle.tally["bumps left out"] += 1
        self._ask(engines, "speak")

    def _rotate(self) -> None:
        """Start everybody again, one after the other, with the secrets of the next round of a change."""
        what = self._fleet.next_secret()
        self.oracle.tally["rounds of secrets"] += 1
        for number, name in enumerate(self._fleet.names):
            self._doing = f"{what}: {name}"
            self.ends(number)
            self._fleet.tell(number, do="end")
            if not self._until(lambda number=number: not self._fleet.is_running(number), _ENDING_S):
                self.oracle.broken.append(f"{name} did not end within {_ENDING_S:g} s; {what}")
                self.wait(0.0)  # ends the run: what the process hangs in is in the report
                self._fleet.kill(number)
            self._fleet.start(number)
            past = self.oracle.past[name]
            if not self._until(lambda past=past: past.is_up, _STARTING_S):
                self.oracle.broken.append(f"{name} is not up within {_STARTING_S:g} s; {what}")

    def _judge_drains(self, *, alone: bool) -> None:
        """Have engines publish anew after a drain that left pages behind, which one alone in its round must not."""
        for name, past in self.oracle.past.items():
            record, past.drained = past.drained, None
            if record is None:
                continue
            self.oracle.tally["drained pages"] += record["n"]
            self.oracle.tally["handed over pages"] += record["h"]
            # who has a hot page as his own already need not adopt it
            if record["h"] == record["n"] and record["a"] >= record["h"] - N_HOT:
                continue
            if alone and record["h"] < record["n"]:
                self.oracle.broken.append(
                    f"{name} handed over {record['h']} of {record['n']} pages, though nothing else befell anybody: "
                    f"{record['why']}"
                )
            self.oracle.tally["drains in part"] += 1
            self._forget()


def _nothing() -> None:
    """End what ends by itself."""
