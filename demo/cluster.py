"""The demo's processes: starts the workers, talks to them, and ends them whatever happens."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from demo import messages
from demo.engine import Progress

START_SECONDS = 60.0
"""A worker draws 25 million weights and starts a node: two seconds, or many on a busy machine."""
MEET_SECONDS = 15.0
COMMAND_SECONDS = 60.0
"""The longest prompt takes five seconds to compute; guess for a busy machine."""
CLOSE_SECONDS = 3.0

# several BLAS threads a process would fight for the cores with each other
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM", "BLIS")}

AnswerT = TypeVar("AnswerT")


class WorkerError(RuntimeError):
    """A worker crashed, gave up or did not answer in time; the message has what it wrote to stderr."""


class Worker:
    """A worker process. One command at a time."""

    def __init__(self, node_id: str, options: Sequence[str]) -> None:
        """Start the process; it says :class:`messages.Ready` some seconds later."""
        self.node_id = node_id
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.worker", "--node-id", node_id, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            env=os.environ | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for the demo; it ends its workers itself
        )
        self._answers: queue.SimpleQueue[messages.Answer | None] = queue.SimpleQueue()
        self._last_words: deque[bytes] = deque(maxlen=25)
        self._readers = [
            threading.Thread(target=read, name=f"p2pkv-demo-{node_id}", daemon=True)
            for read in (self._read_answers, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()

    def call(
        self, command: messages.Command, expected: type[AnswerT], progress: Progress = lambda *_: None
    ) -> AnswerT:
        """Send a command and wait for its answer; raise :class:`WorkerError` if there will be none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._post_mortem("is gone")) from None
        return self.wait(expected, COMMAND_SECONDS, progress)

    def wait(self, expected: type[AnswerT], timeout: float, progress: Progress = lambda *_: None) -> AnswerT:
        """Wait for an answer, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerError(self._post_mortem(f"did not answer within {timeout:.0f} s")) from None
            if isinstance(answer, messages.Progress):
                progress(answer.what, answer.n_done, answer.n_all)
            elif isinstance(answer, expected):
                return answer
            elif isinstance(answer, messages.Failed):
                raise WorkerError(f"{self.node_id} failed: {answer.reason}")
            else:
                raise WorkerError(self._post_mortem("ended" if answer is None else f"answered {answer}"))

    def stop(self) -> None:
        """Tell the process to end, by ending its input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """Wait for the process to end, then make it."""
        self.stop()
        try:
            self._process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(CLOSE_SECONDS)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(messages.Answer)
        try:
            with self._process.stdout as lines:
                for line in lines:
                    self._answers.put(decoder.decode(line))
        finally:
            self._answers.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._last_words.extend(lines)

    def _post_mortem(self, what: str) -> str:
        """Say what happened to the worker, with its exit status and the end of its stderr."""
        try:
            status = self._process.wait(timeout=1.0)  # its output ends a moment before the process does
        except subprocess.TimeoutExpired:
            how = ""
        else:
            how = f" (exit status {status})"
            for reader in self._readers:
                reader.join(1.0)
        lines = [line.decode(errors="replace").rstrip() for line in list(self._last_words)]
        return "\n".join([f"{self.node_id} {what}{how}; the end of its stderr:", *(lines or ["(nothing)"])])


class Cluster:
    """The workers of the demo, by node id."""

    def __init__(self, options: Sequence[str]) -> None:
        """Start nothing yet; ``options`` are passed to every worker."""
        self.workers: dict[str, Worker] = {}
        self._options = ["--join", f"127.0.0.1:{_free_port()}", *options]

    def start(self, node_id: str) -> None:
        """Start one more process, without waiting for it."""
        self.workers[node_id] = Worker(node_id, self._options)

    def meet(self, progress: Progress) -> list[messages.Member]:
        """Wait until every node is up and sees all others; return what the last one sees."""
        for n_ready, worker in enumerate(self.workers.values(), start=1):
            worker.wait(messages.Ready, START_SECONDS)
            progress("up", n_ready, len(self.workers))
        deadline = time.monotonic() + MEET_SECONDS
        for node_id, worker in self.workers.items():
            while True:
                members = worker.call(messages.ListMembers(), messages.Members).members
                missing = set(self.workers) - {m.node_id for m in members}
                if not missing:
                    break
                if time.monotonic() > deadline:
                    others = ", ".join(sorted(missing))
                    raise WorkerError(f"{node_id} has not met {others} within {MEET_SECONDS:.0f} s")
                time.sleep(0.02)
        return sorted(members, key=lambda m: m.node_id)

    def close(self) -> None:
        """Let all processes end, and wait for that."""
        for worker in self.workers.values():
            worker.stop()
        for worker in self.workers.values():
            worker.close()

    def kill(self) -> None:
        """End all processes at once."""
        for worker in self.workers.values():
            worker.kill()


@contextmanager
def running(node_ids: Sequence[str], options: Sequence[str]) -> Iterator[Cluster]:
    """Run a :class:`Cluster` for the ``with`` block; its processes end with it, whatever happens."""
    cluster = Cluster(options)
    try:
        for node_id in node_ids:
            cluster.start(node_id)
        yield cluster
    except BaseException:
        cluster.kill()
        raise
    finally:
        cluster.close()


def _free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
