"""The processes of a fleet, by their numbers: started in a place, signalled, told, counted and ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .namespaces import Network

_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Level:
    """What a process holds of the machine."""

    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def of(cls, pid: int) -> Level:
        proc = Path(f"/proc/{pid}")
        return cls(
            descriptors=len(os.listdir(proc / "fd")),
            threads=len(os.listdir(proc / "task")),
            mappings=len((proc / "maps").read_text().splitlines()),
        )


class Processes(ABC):
    """What every fleet is: its subclasses say who the processes are, and where."""

    bound_s = 20.0
    """How long after the last fault everything may take to be found."""
    counts_from_up = False
    """Whether that is counted from when all processes are up again, if that is later."""

    def __init__(self, names: Sequence[str], seed: int, network: Network, folder: Path) -> None:
        self.n = len(names)
        self.names = list(names)
        self.network = network
        self.folder = folder
        self._seed = seed
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._starts = [0] * self.n
        self._ahead_s = [0.0] * self.n

    @property
    def loaded(self) -> Sequence[int]:
        """Who publishes and fetches."""
        return range(self.n)

    @abstractmethod
    def place(self, number: int) -> int:
        """Return the place, that is the network namespace, of a process."""

    @abstractmethod
    def has_disk(self, number: int) -> bool:
        """Whether a process has a disk tier."""

    @abstractmethod
    def _role(self, number: int) -> dict[str, object]:
        """Return what a process is started with, beside what all are."""

    def kind_of(self, name: str) -> str:
        """Return what processes the one of this name is like: they hold as much of the machine."""
        return "node"

    def journal(self, number: int) -> Path:
        """Return the file that a process writes down what it did in."""
        return self.folder / f"{self.names[number]}.journal"

    def log(self, number: int) -> Path:
        """Return the file of a process's log and stacks."""
        return self.folder / f"{self.names[number]}.log"

    def start(self, number: int) -> None:
        """Start a process; it says in its journal when it is up."""
        self._starts[number] += 1
        settings = self._role(number) | {
            "names": [self.names[each] for each in self.loaded],
            "journal": str(self.journal(number)),
            "ahead_s": self._ahead_s[number],
            "seed": f"{self._seed}/{self.names[number]}/{self._starts[number]}/",
        }
        self._processes[number] = self._open(
            self.place(number),
            [sys.executable, "-m", f"{__package__}.worker", json.dumps(settings)],
            self.log(number),
        )

    def _open(self, place: int, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        with open(log, "a") as file:
            return subprocess.Popen(
                [*self.network.inside(place), *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
                # one thread for numpy: a pool of them is no part of a node, and the level would count it
                env=os.environ
                | {"PYTHONPATH": f"{_TESTS}:{_TESTS / 'support'}", "OPENBLAS_NUM_THREADS": "1"},
            )

    def pid(self, number: int) -> int:
        """Return a process's id."""
        return self._processes[number].pid

    def is_running(self, number: int) -> bool:
        """Whether a process is there; a stopped one is."""
        return number in self._processes and self._processes[number].poll() is None

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal, if the process is there."""
        if self.is_running(number):
            self._processes[number].send_signal(what)

    def kill(self, number: int) -> None:
        """End a process at once, with SIGKILL."""
        if number in self._processes:
            self._processes[number].kill()
            self._processes[number].wait()
            stdin = self._stdin(number)
            try:
                stdin.close()
            except BrokenPipeError:
                return  # a command that it never read

    def shift_clock(self, number: int, seconds: float) -> None:
        """Set a process's wall clock ``seconds`` ahead of what it shows, from now on and in what is started later."""
        self._ahead_s[number] += seconds
        self.tell(number, do="clock", s=seconds)

    def set_next_clock(self, number: int, ahead_s: float) -> None:
        """Set how far a process's wall clock is ahead of the machine's when it is started next."""
        self._ahead_s[number] = ahead_s

    def tell(self, number: int, **command: object) -> None:
        """Give a worker a command, if its process is there; it does them one after another."""
        if self.is_running(number):
            stdin = self._stdin(number)
            try:
                stdin.write(json.dumps(command) + "\n")
                stdin.flush()
            except BrokenPipeError:
                return  # it ends at this moment; whoever waits for the answer finds out

    def _stdin(self, number: int) -> IO[str]:
        stdin = self._processes[number].stdin
        assert stdin is not None
        return stdin

    def limit_descriptors(self, number: int, more: int) -> int:
        """Let a process have ``more`` descriptors than it has now; return its soft limit until then."""
        pid = self.pid(number)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (self._highest(pid) + 1 + more, hard))
        return soft

    def give_descriptors(self, number: int, soft: int) -> None:
        """Set a process's soft limit of descriptors."""
        _, hard = resource.prlimit(self.pid(number), resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid(number), resource.RLIMIT_NOFILE, (soft, hard))

    @staticmethod
    def _highest(pid: int) -> int:
        # the limit is of the number of a descriptor: gaps below the highest one can still be taken
        return max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))

    def levels(self) -> dict[str, Level]:
        """Return what every process holds now."""
        return {name: Level.of(self.pid(number)) for number, name in enumerate(self.names)}

    def native_threads(self, number: int) -> list[str]:
        """Return a line for each thread of a process: its name, its state, and the system call that it is in.

        An interpreter that is at its end shows no stacks any more, but hangs in some call.
        """
        if not self.is_running(number):
            return []
        lines = []
        for task in sorted(Path(f"/proc/{self.pid(number)}/task").iterdir()):
            try:
                said = [(task / name).read_text().strip() for name in ("comm", "stat", "wchan", "syscall")]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended between the two
            comm, stat, wchan, call = said
            lines.append(f"  {task.name} {comm} {stat.rpartition(')')[2].split()[0]} {wchan} {call}")
        return lines

    def end(self, seconds: float) -> list[str]:
        """Have every process close what it has, and end; return those that had to be killed after ``seconds``."""
        for number in range(self.n):
            self.signal(number, signal.SIGCONT)
            self.tell(number, do="end")
        until = time.monotonic() + seconds
        killed = []
        for number, process in self._processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                killed.append(self.names[number])
        return killed

    def close(self) -> None:
        """Kill what still runs. Idempotent."""
        for number in list(self._processes):
            self.kill(number)
