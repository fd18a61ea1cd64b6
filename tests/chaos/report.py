"""What a run says: a line every few seconds, a table at its end, and everything that is left of a failure."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from .oracle import Oracle
from .processes import Processes
from .schedule import Round

_EVERY_S = 5.0
_TAIL = 15
_FRAME = "/threading.py"
"""Frames that every thread has; they are left out."""
_DUMP_S = 1.0
_CALLS = ("publish", "fetch", "exists", "retract", "clear", "get", "receive", "put", "withdraw", "bump")
_OF_HOSTS = ("rounds of secrets", "bumps left out", "drained pages", "handed over pages", "drains in part")


@dataclass(slots=True)
class Report:
    """Of one run."""

    oracle: Oracle
    began: float
    rounds: list[tuple[float, Round]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    _told: float = 0.0

    def progress(self, what: str) -> None:
        """Print a line, if the last is some seconds old."""
        now = time.monotonic()
        if now > self._told + _EVERY_S:
            self._told = now
            tally = self.oracle.tally
            hits, misses = tally["fetch hits"], tally["fetch misses"]
            print(
                f"{now - self.began:6.0f} s  {sum(self.faults.values()):4d} faults  {tally['calls']:7d} calls  "
                f"{hits:8d} hits  {misses:7d} misses  {len(self.oracle.broken)} broken  | {what}",
                flush=True,
            )

    def summary(self) -> None:
        """Print what was done and seen."""
        tally = self.oracle.tally
        print(
            f"\n{'calls':<12}{'n':>9}{'hits':>10}{'misses':>10}{'slowest':>10}  (s, without what was excused)"
        )
        for what in _CALLS:
            n, hits, misses = (tally[f"{what} {column}"] for column in ("calls", "hits", "misses"))
            print(f"{what:<12}{n:>9}{hits:>10}{misses:>10}{self.oracle.slowest.get(what, 0.0):>10.3f}")
        print("faults: " + (", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items())) or "none"))
        done = sorted(self.recoveries)
        if done:
            print(
                f"recovery of {len(done)} rounds: median {done[len(done) // 2]:.1f} s, worst {done[-1]:.1f} s "
                "until every node found every owner's pages"
            )
        if tally["bystanders asked"]:
            found, asked = tally["bystanders found"], tally["bystanders asked"]
            print(f"while a single link was cut, bystanders found {found} of {asked} pages")
        rest = (*_OF_HOSTS, "refused starts")
        if any(tally[what] for what in rest):
            print(", ".join(f"{tally[what]} {what}" for what in rest))
        print(
            f"taken-back hits {tally['taken back hits']}, late calls {tally['late calls']} "
            f"(worst by {self.oracle.worst_late_s:.3f} s), broken promises {len(self.oracle.broken)}"
        )

    def failure(self, fleet: Processes) -> None:
        """Print the broken promises, the rounds so far, and every process's log with its stacks."""
        print("\nBROKEN")
        for text in self.oracle.broken[:20]:
            print(f"  {text}")
        print("rounds until then")
        for at, events in self.rounds:
            print(f"  {at - self.began:6.1f} s  {'; '.join(map(str, events))}")
        print(f"everything written is in {fleet.folder}")
        logs = [fleet.log(number) for number in range(fleet.n)]
        ends = [log.stat().st_size for log in logs]
        native = [fleet.native_threads(number) for number in range(fleet.n)]
        for number in range(fleet.n):
            fleet.signal(number, signal.SIGCONT)
            fleet.signal(number, signal.SIGUSR1)
        time.sleep(_DUMP_S)  # for faulthandler, in other processes, to write
        for log, end, threads in zip(logs, ends, native, strict=True):
            data = log.read_bytes()
            said, stacks = (part.decode(errors="replace").splitlines() for part in (data[:end], data[end:]))
            print(f"---- the end of {log.name}", *said[-_TAIL:], sep="\n")
            print("its threads, as the kernel sees them", *threads, sep="\n")
            print("its stacks", *(line for line in stacks if line and _FRAME not in line), sep="\n")
