"""Starts a program's processes by forking one that has imported all that they need.

Importing p2pkv takes a process half a second of a processor, and the tests start hundreds. A nursery imports the
program's module once, runs no thread, and forks when it is asked to. What is born is the child of whoever asked, and
has nothing of the nursery but the imported modules: its environment and its streams are the asker's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST = 1 << 20
"""The message that asks for a process has no more bytes: an environment fits into it."""


class Nursery:
    """One process that forks, for the threads of the process that made it."""

    def __init__(self, program: str, path: Sequence[str] = ()) -> None:
        """Start it, for ``program``: a module's name or a file's path, whose ``main()`` is what its processes run.

        ``path`` are folders with modules that it needs besides those of PYTHONPATH.
        """
        self._program = program
        searched = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._lock = threading.Lock()
        """It has one request and its answer on the way at a time."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {"OPENBLAS_NUM_THREADS": "1"}  # else numpy would start threads
                | ({"PYTHONPATH": os.pathsep.join(searched)} if searched else {}),
            )

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int | None,
        cwd: str | Path | None,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> Forked:
        """Do what :class:`subprocess.Popen` does, as far as :class:`~p2pkv.testing.processes.ChildProcess` wants it.

        ``command`` is what would run the program without a nursery. Raises :class:`RuntimeError` where the nursery has
        ended, as it does when its program can't be imported; why stands on stderr.
        """
        arguments = list(command[1:])
        if arguments[0] == "-m":
            del arguments[0]
        assert (command[0], arguments[0]) == (sys.executable, self._program), f"this nursery has no {command}"
        assert (stdin, stdout) == (subprocess.PIPE, subprocess.PIPE)
        assert stderr in (subprocess.PIPE, None)
        assert cwd is None
        assert not start_new_session
        their_stdin, my_stdin = os.pipe()
        my_stdout, their_stdout = os.pipe()
        my_stderr, their_stderr = os.pipe() if stderr is not None else (None, 2)
        mine = [my_stdin, my_stdout, *([my_stderr] if my_stderr is not None else [])]
        theirs = [their_stdin, their_stdout, their_stderr]
        try:
            pid = self._fork({"arguments": arguments, "environ": dict(env)}, theirs)
        except OSError as error:
            for number in mine:
                os.close(number)
            raise RuntimeError(f"the nursery of {self._program} has ended") from error
        finally:
            for number in theirs[: len(mine)]:
                os.close(number)
        return Forked(command, pid, *mine)

    def _fork(self, request: object, streams: list[int]) -> int:
        with self._lock, _adopting():
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            answer = self._socket.recv(8)
        if not answer:
            raise ConnectionResetError
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        """End it. What it forked lives on."""
        self._socket.close()
        self._process.wait()


class Forked:
    """Stands for a process that was forked, as :class:`subprocess.Popen` does for one that it started."""

    def __init__(
        self, command: Sequence[str], pid: int, stdin: int, stdout: int, stderr: int | None = None
    ) -> None:
        """Take over the numbers of this side's ends of its streams."""
        self.args = command
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb")
        self.stderr: IO[bytes] | None = None if stderr is None else os.fdopen(stderr, "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()
        """It guards the end: a process that was waited for is not waited for, nor signalled, again."""
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return its exit status, which is minus the number of a signal that ended it."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if self.returncode is None and not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it was seen to have ended."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def nursery(program: str, path: tuple[str, ...] = ()) -> Nursery:
    """Return this process's nursery of ``program``, which ends with this process."""
    made = Nursery(program, path)
    atexit.register(made.close)
    return made


@contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of whichever process below loses its own."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _fork_when_asked(asked: socket.socket) -> bool:
    """In the nursery: fork whenever somebody asks. Return true in what was forked, false when nobody will ask more."""
    while True:
        request, streams, _, _ = socket.recv_fds(asked, _LONGEST, 3)
        if not request:
            return False
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            # Who loses its parent is adopted by the asker, which wants to be that.
            born = os.fork()
            if born:
                os.write(tell, born.to_bytes(8, "little"))
                os._exit(0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for number in (*streams, told, tell):
                os.close(number)
            asked.close()
            wanted = json.loads(request)
            sys.argv = wanted["arguments"]
            os.environ.clear()
            os.environ.update(wanted["environ"])
            sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            return True
        for number in (*streams, tell):
            os.close(number)
        os.waitpid(between, 0)  # from then on it is the asker's
        asked.send(os.read(told, 8))
        os.close(told)


def main(program: str, asked: int) -> None:
    """Be the nursery, and then each of its children."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    del sys.path[0]  # this file's folder, which is none of the program's
    sys.path.insert(0, str(Path(program).parent) if os.path.isabs(program) else os.getcwd())
    module = importlib.import_module(Path(program).stem if os.path.isabs(program) else program)
    assert len(os.listdir("/proc/self/task")) == 1, "what runs threads must not fork"
    gc.freeze()  # a child that looks at what all share would copy it
    if _fork_when_asked(socket.socket(fileno=asked)):
        module.main()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
