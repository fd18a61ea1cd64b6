"""Run the hunts side by side for as long as one wants; end with a table, and with what replays each broken promise."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.table import Table

from hunts.found import hunts
from hunts.frame import Hunt
from p2pkv.testing.nursery import nursery

_PROGRESS_S = 10.0
_TOLD = 8000
"""Characters of the end of what a process said are told."""
_TESTS = Path(__file__).resolve().parents[1]
_PATH = str(_TESTS), str(_TESTS / "support")
_WORKER = "hunts.worker"


@dataclass
class Run:
    """One hunt's process, and the last that it said."""

    hunt: Hunt
    first_seed: int
    seconds: float
    replay: bool
    last: dict[str, object] = field(default_factory=dict)
    code: int | None = None
    errors: str = ""

    def to_the_end(self) -> None:
        """Start the process and follow it until it ends; a silent one is ended after the hunt's patience."""
        command = [sys.executable, "-m", _WORKER, self.hunt.name, str(self.first_seed), str(self.seconds)]
        path = os.pathsep.join([*_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = nursery(_WORKER, _PATH).popen(
            command + ["--replay"] * self.replay,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=None,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=False,
        )
        # Where the interpreter itself is stuck, the process's own alarm does not ring.
        alarm = threading.Timer(self.seconds + 2 * self.hunt.patience, process.kill)
        alarm.start()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdin, process.stdout, process.stderr as errors:
            said: list[bytes] = []
            reader = threading.Thread(target=lambda: said.append(errors.read()))
            reader.start()
            for line in process.stdout:
                if line.startswith(b"{"):
                    self.last = json.loads(line)
            self.code = process.wait()
            alarm.cancel()
            reader.join()
        self.errors = said[0].decode(errors="replace")

    @property
    def is_broken(self) -> bool:
        return self.code not in (None, 0)

    def story(self) -> str:
        """Return what went wrong, and the command that does it again."""
        what = self.last.get("traceback") or f"the process ended with {self.code}:\n{last_words(self.errors)}"
        seed = self.last.get("seed", self.first_seed)
        replay = f"replay: make test-hunts HUNT={self.hunt.name} SEED={seed}"
        return f"{self.hunt.name} is broken at seed {seed}\n{what}\n{replay}"


def last_words(said: str) -> str:
    """Return the end of what a process said, and before it where it crashed, which may stand in the middle."""
    crashed = [part for part in said[:-_TOLD].split("\n\n") if part.startswith("Current thread")]
    return "\n\n".join([*crashed, said[-_TOLD:]])


def main() -> int:
    """Parse the command line, run, report; non-zero if a promise was broken."""
    parser = argparse.ArgumentParser(prog="hunts", description=__doc__)
    parser.add_argument("--seconds", type=float, help="of the whole run, shared by the hunts (default 60)")
    parser.add_argument("--hunt", action="append", help="this one only; may be given several times")
    parser.add_argument("--seed", type=int, help="replay this schedule (again and again, with --seconds)")
    parser.add_argument("--from-seed", type=int, help="the first seed (default: drawn)")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="hunts at a time")
    arguments = parser.parse_args()
    known = hunts()
    unknown = sorted(set(arguments.hunt or []) - set(known))
    if unknown:
        parser.error(f"no hunt is called {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.hunt or known]
    replay = arguments.seed is not None
    seconds = arguments.seconds if arguments.seconds is not None else (0.0 if replay else 60.0)
    jobs = min(arguments.jobs, len(chosen))
    first = next(
        (seed for seed in (arguments.seed, arguments.from_seed) if seed is not None), random.randrange(2**31)
    )
    runs = [Run(hunt, first, seconds * jobs / len(chosen), replay) for hunt in chosen]
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"{len(runs)} hunts from seed {first}, {jobs} at a time, {seconds:.0f} s in all")
    _run_all(runs, jobs, console)
    console.print(_table(runs))
    for run in runs:
        if run.is_broken:
            console.print(run.story(), markup=False)
    return 1 if any(run.is_broken for run in runs) else 0


def _run_all(runs: list[Run], jobs: int, console: Console) -> None:
    waiting: SimpleQueue[Run] = SimpleQueue()
    for run in runs:
        waiting.put(run)

    def work() -> None:
        while True:
            try:
                run = waiting.get_nowait()
            except Empty:
                return
            run.to_the_end()

    nursery(_WORKER, _PATH)  # here, where no two threads make it at once
    threads = [threading.Thread(target=work, name=f"hunts-{i}") for i in range(jobs)]
    for thread in threads:
        thread.start()
    said = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(timeout=0.2)
            if time.monotonic() - said >= _PROGRESS_S:
                said = time.monotonic()
                for run in runs:
                    if run.last and run.code is None:
                        console.print(f"  {run.hunt.name}: {_progress(run)}", markup=False)


def _progress(run: Run) -> str:
    tally = run.last.get("tally") or {}
    assert isinstance(tally, dict)
    counts = ", ".join(f"{count:,} {what}" for what, count in tally.items())
    return f"{run.last.get('schedules', 0):,} schedules, seed {run.last.get('seed')}; {counts}"


def _table(runs: list[Run]) -> Table:
    table = Table(title="hunts")
    for column in ("hunt", "promise", "seconds", "schedules", "checked", "memory", "outcome"):
        table.add_column(column, overflow="fold")
    for run in runs:
        tally, grown = run.last.get("tally") or {}, run.last.get("grown", 0)
        assert isinstance(tally, dict)
        assert isinstance(grown, int)
        table.add_row(
            run.hunt.name,
            run.hunt.promise,
            f"{float(str(run.last.get('seconds', 0))):.0f}",
            f"{run.last.get('schedules', 0):,}",
            "\n".join(f"{count:,} {what}" for what, count in tally.items()),
            f"+{grown / 2**20:.0f} MiB",
            "BROKEN" if run.is_broken else "held",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
