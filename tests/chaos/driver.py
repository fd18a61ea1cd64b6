"""Plays the rounds of a seed on a fleet, and stops at the first broken promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from . import faults, schedule
from .journal import JournalReader
from .oracle import Oracle, Watch
from .processes import Level, Processes
from .recovery import Recovery
from .report import Report

_QUIET_S = 3.0
"""How long the load runs before the level is taken: by then everybody has met everybody."""
_END_S = 30.0
"""For a process to end; that of its node has a limit of its own, this one is for an interpreter without a processor."""
_CLOSE_S = 3.0
"""How long a node's close may take."""
_TICK_S, _LATE_S = 0.01, 0.003


class Broken(AssertionError):
    """A promise was seen broken; the oracle has the words."""


class Driver:
    """Plays the rounds of a seed, and stops at the first broken promise."""

    def __init__(
        self,
        fleet: Processes,
        rounds: Iterator[schedule.Round],
        *,
        keep_going: bool,
        kept: Sequence[str] = (),
    ) -> None:
        """``kept`` are those whose pages outlive them."""
        readers = {name: JournalReader(fleet.journal(number)) for number, name in enumerate(fleet.names)}
        disks = [name for number, name in enumerate(fleet.names) if fleet.has_disk(number)]
        self._fleet = fleet
        self._keep_going = keep_going
        self._rounds = rounds
        self._doing = "start"
        self.oracle = Oracle(readers, disks, kept)
        self.report = Report(self.oracle, time.monotonic())
        self.recovery = Recovery(fleet, self.oracle, self.wait)
        threading.Thread(target=self._keep_time, name="metronome", daemon=True).start()

    def _keep_time(self) -> None:
        """Measure for ever when the machine did not let even this process run."""
        while True:
            began = time.monotonic()
            time.sleep(_TICK_S)
            ended = time.monotonic()
            if ended - began > _TICK_S + _LATE_S:
                self.oracle.host_late.append((began + _TICK_S, ended))

    def run(self, seconds: float) -> None:
        """Start all processes, play rounds for ``seconds``, and see that all is as it was."""
        for number in range(self._fleet.n):
            self._fleet.start(number)
        self._recover(time.monotonic(), "the start")
        self.wait(_QUIET_S)
        before = self.recovery.levels()
        until = self.report.began + seconds
        while time.monotonic() < until:
            events = next(self._rounds)
            self.report.rounds.append((time.monotonic(), events))
            self._doing = "; ".join(map(str, events)) or "nothing"
            self._watch(events)
            self.report.recoveries.append(self._recover(self._play(events), self._doing))
            self.oracle.judge_watch()
        self._settle(before)

    def _watch(self, events: schedule.Round) -> None:
        """If nothing but one link is cut, have the oracle watch those at neither end of it."""
        if [event.kind for event in events] != ["cut"]:
            return
        (cut,) = events
        touched = {self._fleet.place(node) for node in cut.nodes}
        bystanders = (name for i, name in enumerate(self._fleet.names) if self._fleet.place(i) not in touched)
        now = time.monotonic()
        self.oracle.watch = Watch(frozenset(bystanders), now + cut.at, now + cut.at + cut.lasts)

    def _play(self, events: schedule.Round) -> float:
        """Let faults begin and end as a round has it; return when the last was over."""
        began = time.monotonic()
        todo = sorted(events, key=lambda event: event.at)
        undo: list[tuple[float, faults.Undo]] = []
        try:
            while todo or undo:
                now = time.monotonic() - began
                while todo and todo[0].at <= now:
                    event = todo.pop(0)
                    self.report.faults[event.kind] += 1
                    undo.append((event.at + event.lasts, self._begin(event)))
                for end in [each for each in undo if each[0] <= now]:
                    undo.remove(end)
                    end[1]()
                self.wait(0.02)
        finally:
            for _, end_now in undo:
                end_now()
        return time.monotonic()

    def _begin(self, event: schedule.Event) -> faults.Undo:
        return faults.begin(event, self._fleet, self)

    def killed(self, number: int) -> None:
        """Note that a process is about to be killed."""
        self.oracle.killed(self._fleet.names[number], time.monotonic())

    def ends(self, number: int) -> None:
        """Note that a process is about to be told to end."""
        self.oracle.ends(self._fleet.names[number])

    def _recover(self, since: float, what: str) -> float:
        self._doing = f"recovery from {what}"
        seconds = self.recovery.seconds(since)
        if seconds == float("inf"):
            missing = "; ".join(self.recovery.missing[:6])
            self.oracle.broken.append(f"not whole {time.monotonic() - since:.1f} s after {what}: {missing}")
        self.wait(0.0)
        return seconds

    def _settle(self, before: dict[str, Level]) -> None:
        """See that every process is back at its level, and ends when it is told to."""
        self._doing = "levels and ends"
        self.oracle.broken += self.recovery.above(before)
        killed = self._fleet.end(_END_S)
        self.oracle.broken += [f"{name} did not end within {_END_S:g} s" for name in killed]
        self.wait(0.0)
        self.wait(0.0)
        for name, past in self.oracle.past.items():
            if past.ended is not None and past.ended > _CLOSE_S:
                self.oracle.broken.append(f"{name} took {past.ended:.1f} s to close")
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Let ``seconds`` pass, reading the journals; raises :class:`Broken` at the first broken promise."""
        until = time.monotonic() + seconds
        while True:
            self.oracle.read()
            self.report.progress(self._doing)
            dead = [
                name
                for number, name in enumerate(self._fleet.names)
                if self.oracle.past[name].is_up and not self._fleet.is_running(number)
            ]
            for name in dead:
                if self.oracle.past[name].ended is None:
                    self.oracle.broken.append(f"{name}'s process died")
                    self.oracle.past[name].is_up = False
            if self.oracle.broken and not self._keep_going:
                raise Broken
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.25))
