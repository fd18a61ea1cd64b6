"""The demo's processes: starts the workers, talks to them, and ends them whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from demo import messages
from demo.engine import Progress
from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import ChildEndedError, ChildProcess

START_SECONDS = 60.0
"""A worker draws 25 million weights and starts a node: two seconds, or many on a busy machine."""
MEET_SECONDS = 15.0
COMMAND_SECONDS = 60.0
"""The longest prompt takes five seconds to compute; guess for a busy machine."""
CLOSE_SECONDS = 3.0

# several BLAS threads a process would fight for the cores with each other
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM", "BLIS")}

AnswerT = TypeVar("AnswerT")
_DECODER = msgspec.json.Decoder(messages.Answer)


class WorkerError(RuntimeError):
    """A worker crashed, gave up or did not answer in time; the message has what it wrote to stderr."""


class Worker(ChildProcess):
    """A worker process, or a host's node, which takes no commands. One command at a time."""

    def __init__(self, node_id: str, options: Sequence[str], module: str = "demo.worker") -> None:
        """Start the process; it says :class:`messages.Ready` some seconds later."""
        super().__init__(
            [sys.executable, "-m", module, "--node-id", node_id, *options],
            name=node_id,
            environ=os.environ | ONE_THREAD,
            folder=Path(__file__).parent.parent,
            keeps_errors=True,
            is_apart=True,  # Ctrl-C is for the demo; it ends its workers itself
        )

    def call(
        self, command: messages.Command, expected: type[AnswerT], progress: Progress = lambda *_: None
    ) -> AnswerT:
        """Send a command and wait for its answer; raise :class:`WorkerError` if there will be none."""
        try:
            self.write(msgspec.json.encode(command))
        except ChildEndedError as error:
            raise WorkerError(str(error)) from None
        return self.wait(expected, COMMAND_SECONDS, progress)

    def wait(self, expected: type[AnswerT], timeout: float, progress: Progress = lambda *_: None) -> AnswerT:
        """Wait for an answer, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer = _DECODER.decode(self.read(deadline - time.monotonic()))
            except TimeoutError:
                raise WorkerError(self.post_mortem(f"did not answer within {timeout:.0f} s")) from None
            except ChildEndedError as error:
                raise WorkerError(str(error)) from None
            if isinstance(answer, messages.Progress):
                progress(answer.what, answer.n_done, answer.n_all)
            elif isinstance(answer, expected):
                return answer
            elif isinstance(answer, messages.Failed):
                raise WorkerError(f"{self.name} failed: {answer.reason}")
            else:
                raise WorkerError(self.post_mortem(f"answered {answer}"))


class Cluster:
    """The processes of the demo, by node id."""

    def __init__(self, options: Sequence[str]) -> None:
        """Start nothing yet; ``options`` are passed to every worker."""
        self.workers: dict[str, Worker] = {}
        self.hosts: dict[str, Worker] = {}
        """The hosts' nodes, which compute nothing."""
        self._attached: set[str] = set()
        self._meeting = ["--join", f"127.0.0.1:{free_port()}"]
        self._options = options
        self._folder = TemporaryDirectory(prefix="p2pkv-demo-")
        self._socket = f"unix:{self._folder.name}/host"

    def start(self, node_id: str) -> None:
        """Start one more worker, a node of its own, without waiting for it."""
        self.workers[node_id] = Worker(node_id, [*self._meeting, *self._options])

    def start_host(self, node_id: str) -> None:
        """Start a host's node, and wait for it: a worker that finds none to attach to ends."""
        self.hosts[node_id] = host = Worker(
            node_id, [*self._meeting, "--attach-listen", self._socket], module="demo.host"
        )
        host.wait(messages.Ready, START_SECONDS)

    def start_attached(self, node_id: str) -> None:
        """Start a worker that attaches to the host's node, without waiting for it."""
        self.workers[node_id] = Worker(node_id, [*self._meeting, *self._options, "--attach", self._socket])
        self._attached.add(node_id)

    def replace_attached(self, node_id: str, progress: Progress) -> None:
        """Kill a worker that is attached, and wait for its successor."""
        self.workers[node_id].kill()
        self.workers[node_id].close()
        progress("up", 0, 1)
        self.start_attached(node_id)
        self.workers[node_id].wait(messages.Ready, START_SECONDS)
        progress("up", 1, 1)

    def meet(self, progress: Progress) -> list[messages.Member]:
        """Wait until every worker is up and sees all nodes; return what the last one sees."""
        for n_ready, worker in enumerate(self.workers.values(), start=1):
            worker.wait(messages.Ready, START_SECONDS)
            progress("up", n_ready, len(self.workers))
        nodes = {*self.workers, *self.hosts} - self._attached
        deadline = time.monotonic() + MEET_SECONDS
        for node_id, worker in self.workers.items():
            while True:
                members = worker.call(messages.ListMembers(), messages.Members).members
                missing = nodes - {m.node_id for m in members}
                if not missing:
                    break
                if time.monotonic() > deadline:
                    others = ", ".join(sorted(missing))
                    raise WorkerError(f"{node_id} has not met {others} within {MEET_SECONDS:.0f} s")
                time.sleep(0.02)
        return sorted(members, key=lambda m: m.node_id)

    def close(self) -> None:
        """Let all processes end, and wait for that."""
        for process in self._processes():
            process.finish()
        for process in self._processes():
            process.close(CLOSE_SECONDS)
        self._folder.cleanup()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes():
            process.kill()

    def _processes(self) -> list[Worker]:
        return [*self.workers.values(), *self.hosts.values()]


@contextmanager
def running(options: Sequence[str]) -> Iterator[Cluster]:
    """Run a :class:`Cluster` for the ``with`` block; its processes end with it, whatever happens."""
    cluster = Cluster(options)
    try:
        yield cluster
    except BaseException:
        cluster.kill()
        raise
    finally:
        cluster.close()
