"""Run chaos: ``python -m chaos --seconds 300 --seed 7``. Ends with 0, or with 1 at the first broken promise."""

from __future__ import annotations

import argparse
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from . import faults, schedule
from .fleet import Fleet, Level
from .journal import JournalReader
from .namespaces import Network, unavailable
from .oracle import Oracle, Watch
from .recovery import Recovery
from .report import Report

_QUIET_S = 3.0
"""How long the load runs before the level is taken: by then everybody has met everybody."""
_END_S = 10.0
_CLOSE_S = 3.0
"""How long a node's close may take."""
_TICK_S, _LATE_S = 0.01, 0.003


class Broken(AssertionError):
    """A promise was seen broken; the oracle has the words."""


class Driver:
    """Plays the rounds of a seed, and stops at the first broken promise."""

    def __init__(self, fleet: Fleet, seed: int, kinds: set[str], *, keep_going: bool) -> None:
        readers = {name: JournalReader(fleet.journal(number)) for number, name in enumerate(fleet.names)}
        disks = [name for number, name in enumerate(fleet.names) if fleet.has_disk(number)]
        self._fleet = fleet
        self._keep_going = keep_going
        self._rounds = schedule.rounds(seed, fleet.n, kinds)
        self._doing = "start"
        self.oracle = Oracle(readers, disks)
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
        """Start the nodes, play rounds for ``seconds``, and see that all is as it was."""
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
                    undo.append((event.at + event.lasts, faults.begin(event, self._fleet, self._killed)))
                for end in [each for each in undo if each[0] <= now]:
                    undo.remove(end)
                    end[1]()
                self.wait(0.02)
        finally:
            for _, end_now in undo:
                end_now()
        return time.monotonic()

    def _killed(self, number: int) -> None:
        self.oracle.killed(self._fleet.names[number], time.monotonic())

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


def main() -> int:
    """Run as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None, help="replays the rounds of that run")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(schedule.KINDS), help="faults to draw from, by comma")
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after a broken promise, and list all"
    )
    given = parser.parse_args()
    why = unavailable()
    if why is not None:
        print(f"chaos is skipped: {why}")
        return 0
    seed = secrets.randbits(31) if given.seed is None else given.seed
    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="p2pkv-chaos-"))
    command = f"PYTHONPATH=tests:tests/support python -m chaos {shlex.join(_again(sys.argv[1:], seed))}"
    print(f"seed {seed}; {command}", flush=True)
    kinds = set(given.kinds.split(","))
    if not kinds <= set(schedule.KINDS):
        parser.error(f"kinds are {', '.join(schedule.KINDS)}")
    with ExitStack() as undo:
        removed = undo.enter_context(ExitStack())
        removed.callback(shutil.rmtree, folder, ignore_errors=True)
        network = Network(given.nodes - 1)
        undo.callback(network.close)
        for kind, reason in network.lacks().items():
            print(f"no faults of kind '{kind}': {reason}")
            kinds.discard(kind)
        fleet = Fleet(given.nodes, seed, network, folder)
        undo.callback(fleet.close)
        driver = Driver(fleet, seed, kinds, keep_going=given.keep_going)
        try:
            driver.run(given.seconds)
        except Broken:
            pass  # the oracle has it, and it is told below
        if driver.oracle.broken:
            removed.pop_all()  # what was written stays, to be read
            driver.report.failure(fleet)
        driver.report.summary()
        if driver.oracle.broken:
            print(f"replay: {command}")
    return 1 if driver.oracle.broken else 0


def _again(arguments: list[str], seed: int) -> list[str]:
    """Return the command line that replays this run."""
    return arguments if "--seed" in arguments else [*arguments, "--seed", str(seed)]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
