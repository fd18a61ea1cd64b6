"""Child processes that do what they are told in lines on stdin, and answer in lines on stdout.

The tests, the benchmark and the demo start their nodes with this. The lines are JSON unless a program has a format of
its own. The end of stdin is the order to end, so that no child outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, Queue
from typing import IO, TYPE_CHECKING, Any, Protocol

from p2pkv.errors import P2PKVError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

_KEPT_LINES = 25
"""Of stderr: the traceback of a deep call fits."""
_STOP_S = 60.0
"""A stopped process stands still within milliseconds, unless the machine has nothing left for its threads."""
_WORDS_S = 1.0
"""A process's output ends a moment before the process does."""


class ChildEndedError(Exception):
    """The process has ended, so that it answers nothing more; the message has the end of its stderr if that is kept."""


class RefusedError(Exception):
    """The process answered with an error; ``args`` are the name of its class and its message."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class Started(Protocol):
    """Says what a :class:`ChildProcess` needs of what has started it: a part of :class:`subprocess.Popen`."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


class ChildProcess:
    """A process of ``command``, started at once. For one thread at a time.

    Args:
        command: The program and its arguments.
        name: What errors call it.
        environ: Its whole environment; None for this process's.
        folder: Its working directory.
        keeps_errors: Keep the end of its stderr for :meth:`post_mortem`, instead of leaving stderr to the terminal.
        is_apart: Put it into a session of its own, so that Ctrl-C ends this process alone.
        popen: What starts it instead of :class:`subprocess.Popen`, with the same arguments: a nursery's, for one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        environ: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        keeps_errors: bool = False,
        is_apart: bool = False,
        popen: Callable[..., Started] = subprocess.Popen,
    ) -> None:
        self.name = name
        self._process: Started = popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if keeps_errors else None,
            cwd=folder,
            env={**(os.environ if environ is None else environ), "PYTHONUNBUFFERED": "1"},
            start_new_session=is_apart,
        )
        self._lines: Queue[bytes | None] = Queue()
        self._last_words: deque[bytes] | None = deque(maxlen=_KEPT_LINES) if keeps_errors else None
        reads = [self._read_lines, *([self._read_errors] if keeps_errors else [])]
        self._readers = [
            threading.Thread(target=read, name=f"p2pkv-child-{name}", daemon=True) for read in reads
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        """Give it a line, without the newline. Raises :class:`ChildEndedError`."""
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            raise ChildEndedError(self.post_mortem("is gone")) from None

    def read(self, timeout: float) -> bytes:
        """Wait ``timeout`` seconds for its next line. Raises :class:`TimeoutError` and :class:`ChildEndedError`."""
        try:
            line = self._lines.get(timeout=max(0.0, timeout))
        except Empty:
            raise TimeoutError(f"{self.name} did not answer within {timeout:g} s") from None
        if line is None:
            self._lines.put(None)  # for whoever asks again
            raise ChildEndedError(self.post_mortem("has ended"))
        return line

    def send(self, command: str, **arguments: object) -> None:
        """Tell it to do something; :meth:`answer` waits for the end of that. Raises :class:`ChildEndedError`."""
        self.write(json.dumps({"command": command, "arguments": arguments}).encode())

    def answer(self, timeout: float) -> Any:
        """Return what the oldest unanswered command returned.

        Raises:
            RefusedError: it raised one of p2pkv's errors.
            TimeoutError: there was no answer within ``timeout`` seconds.
            ChildEndedError: there will be none.
        """
        answer = json.loads(self.read(timeout))
        if "error" in answer:
            raise RefusedError(answer["error"], answer["message"])
        return answer["result"]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it (SIGSTOP), and return when each of its threads stands still, which is later than the signal."""
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + _STOP_S
        while not self._stands_still():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name} still runs {_STOP_S:g} s after SIGSTOP")
            time.sleep(0.001)  # the kernel tells nobody

    def _stands_still(self) -> bool:
        stats = (path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat"))
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def resume(self) -> None:
        """Let it go on after :meth:`stop`."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once (SIGKILL), and return when it has ended. Idempotent."""
        self._process.kill()
        self._process.wait()

    def finish(self) -> None:
        """Tell it to end, by ending its stdin. Idempotent."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            return  # a command that it never read

    def close(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for it to end by itself, then kill it, and give back what it held. Idempotent."""
        self.finish()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def post_mortem(self, what: str) -> str:
        """Say what happened to it, with its exit status and the end of its stderr if they are known."""
        try:
            text = f"{self.name} {what} (exit status {self._process.wait(_WORDS_S)})"
        except subprocess.TimeoutExpired:
            text = f"{self.name} {what}"
        if self._last_words is None:
            return text
        self._readers[-1].join(_WORDS_S)
        lines = [line.decode(errors="replace").rstrip() for line in list(self._last_words)]
        return "\n".join([f"{text}; the end of its stderr:", *(lines or ["(nothing)"])])

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        assert self._last_words is not None
        self._last_words.extend(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def obey(
    worker: object, *, errors: tuple[type[Exception], ...] = (P2PKVError,), answers: IO[bytes] | None = None
) -> None:
    """In the child: do what stdin says with the methods of ``worker``, one after another, until it ends.

    A command is ``{"command": "fetch", "arguments": {...}}``; its answer ``{"result": ...}``, or ``{"error": class,
    "message": text}`` for one of ``errors``. Any other error ends the process. Answers go to stdout, or to ``answers``.
    """
    for line in sys.stdin.buffer:
        request = json.loads(line)
        command: Callable[..., Any] = getattr(worker, request["command"])
        try:
            answer = {"result": command(**request["arguments"])}
        except errors as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        say(answer, answers)


def say(answer: object, answers: IO[bytes] | None = None) -> None:
    """In the child: write one line to stdout, or to ``answers``."""
    answers = answers or sys.stdout.buffer
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def claim_stdout() -> IO[bytes]:
    """In the child: return stdout for answers alone; whatever else the process prints goes to stderr from now on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers
