"""The node processes of a run as the driver sees them: where they are, what they are told, what they hold.

Nodes 0 and 1 share a place, so that they read each other over shm; every other node has a place of its own. Every odd
node has a disk: a small tmpfs that can be filled, below a pool that holds three quarters of its pages.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .contents import NBYTES
from .load import DEADLINE_S, N_PAGES
from .namespaces import Network

_JOIN_PORT = 7400
_DISK = "24m"
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


class Fleet:
    """``n`` nodes; each is started, signalled, told and ended by its number."""

    def __init__(self, n: int, seed: int, network: Network, folder: Path) -> None:
        self.n = n
        self.names = [f"n{number}" for number in range(n)]
        self.network = network
        self.folder = folder
        self._seed = seed
        # with one address only, everything is met that can befall the node which holds it
        self._join_places = (0, 1) if seed % 2 == 0 else (1,)
        self._secret = folder / "secret"
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._starts = [0] * n
        self._ahead_s = [0.0] * n
        self._undo = ExitStack()
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(32))
        for number in range(n):
            if self.has_disk(number):
                self._mount(self.disk(number))

    def _mount(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs", str(path)], check=True
        )
        self._undo.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False)

    def has_disk(self, number: int) -> bool:
        """Whether a node has a disk tier."""
        return number % 2 == 1

    def disk(self, number: int) -> Path:
        """Return the folder that a node's disk is mounted at."""
        return self.folder / f"disk-n{number}"

    def place(self, number: int) -> int:
        """Return the place, that is the network namespace, of a node."""
        return max(0, number - 1)

    def journal(self, number: int) -> Path:
        """Return the file that a node's processes write down what they did in."""
        return self.folder / f"n{number}.journal"

    def log(self, number: int) -> Path:
        """Return the file of a node's log and stacks."""
        return self.folder / f"n{number}.log"

    def _settings(self, number: int) -> dict[str, object]:
        name, network = self.names[number], self.network
        config: dict[str, object] = {
            "node_id": name,
            "listen": f"{network.address(self.place(number))}:0",
            "join": [f"{network.address(place)}:{_JOIN_PORT}" for place in self._join_places],
            "secret_file": str(self._secret),
            "transports": ["shm", "tcp"],
            "pool_size": 8 << 20,
            "buffer_size": "4MiB",
            "deadline": DEADLINE_S,
        }
        if self.has_disk(number):
            disk = {"disk_path": str(self.disk(number) / "store"), "disk_size": "16MiB"}
            config |= disk | {"pool_size": N_PAGES * NBYTES * 3 // 4}
        return {
            "config": config,
            "names": self.names,
            "journal": str(self.journal(number)),
            "ahead_s": self._ahead_s[number],
            "seed": f"{self._seed}/{name}/{self._starts[number]}/",
        }

    def start(self, number: int) -> None:
        """Start a node's process; it says in its journal when it is up."""
        self._starts[number] += 1
        command = [sys.executable, "-m", f"{__package__}.worker", json.dumps(self._settings(number))]
        with open(self.log(number), "a") as log:
            self._processes[number] = subprocess.Popen(
                [*self.network.inside(self.place(number)), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                # one thread for numpy: a pool of them is no part of a node, and the level would count it
                env=os.environ
                | {"PYTHONPATH": f"{_TESTS}:{_TESTS / 'support'}", "OPENBLAS_NUM_THREADS": "1"},
            )

    def pid(self, number: int) -> int:
        """Return a node's process id."""
        return self._processes[number].pid

    def is_running(self, number: int) -> bool:
        """Whether a node's process is there; a stopped one is."""
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
        """Set a node's wall clock ``seconds`` ahead of what it shows, from now on and in what is started later."""
        self._ahead_s[number] += seconds
        self.tell(number, do="clock", s=seconds)

    def set_next_clock(self, number: int, ahead_s: float) -> None:
        """Set how far a node's wall clock is ahead of the machine's when it is started next."""
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

    def fill_disk(self, number: int) -> None:
        """Take all that is free on a node's disk."""
        room = os.statvfs(self.disk(number))
        try:
            with open(self._ballast(number), "wb", buffering=0) as file:
                while file.write(bytes(min(1 << 20, max(4096, room.f_bavail * room.f_bsize)))):
                    pass
        except OSError:
            return  # ENOSPC: that is what was wanted

    def empty_disk(self, number: int) -> None:
        """Give back what :meth:`fill_disk` took."""
        self._ballast(number).unlink(missing_ok=True)

    def _ballast(self, number: int) -> Path:
        return self.disk(number) / "ballast"

    def level(self, number: int) -> Level:
        """Return what a node's process holds now."""
        return Level.of(self.pid(number))

    def end(self, seconds: float) -> list[str]:
        """Have every node close and its process end; return those that had to be killed after ``seconds``."""
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
        """Kill what still runs, and unmount the disks. Idempotent."""
        for number in list(self._processes):
            self.kill(number)
        self._undo.close()
