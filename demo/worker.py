"""One engine with its p2pkv node as a process: commands come in on stdin, answers go out on stdout.

It ends when stdin does, so it can't outlive the process that started it. What others print to stdout goes to
stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from typing import IO

import msgspec

from demo import messages
from demo.engine import Engine
from demo.model import Model, Shape, encode
from demo.node_store import NodeStore
from demo.paged_kv import OutOfPagesError, PagedKV, Spans
from p2pkv import Config, Node
from p2pkv.errors import P2PKVError
from p2pkv.testing.processes import claim_stdout

SMALL = Shape(n_layers=2, width=64, n_heads=4)
"""A model for tests, which are of what is around it."""
N_PAGES = 96
"""Pages of KV cache: 1,536 tokens, more than the longest prompt and its output."""
POOL_SIZE = "64MiB"
"""Published pages: room for two of the longest prompts a node, which have 36 MiB each at most. A worker that is
attached has its host's node's."""


class Worker:
    """Answers commands with an engine that shares its pages and one that doesn't, over the same cache."""

    def __init__(self, model: Model, node: Node, answers: IO[bytes], *, is_attached: bool = False) -> None:
        """``kv`` is registered with ``node``: close the node before dropping the worker."""
        self.kv = PagedKV(N_PAGES, model.shape.page)
        self._node = node
        self._is_attached = is_attached
        self._answers = answers
        self._shared = Engine(model, self.kv, NodeStore(node, self.kv))
        self._alone = Engine(model, self.kv, None)

    def warm_up(self) -> None:
        """Touch the weights once, so that the first command isn't timed with cold caches."""
        self._alone.generate(encode(b""), 2, lambda *_: None)

    def run(self, command: messages.Command, *, sabotage: bool) -> messages.Answer:
        """Do what ``command`` says. ``sabotage`` flips a bit of the KV that a ``Generate`` fetches."""
        before = self._traffic()
        if isinstance(command, messages.Prefill):
            prefilled = self._shared.prefill(command.prompt, self._progress)
            return messages.PrefillDone(prefilled, self._traffic_since(before))
        if isinstance(command, messages.Generate):
            prompt, n_new = command.prompt, command.n_new
            after_fetch = _flip_a_bit if sabotage else _keep
            generated = self._shared.generate(prompt, n_new, self._progress, after_fetch=after_fetch)
            return messages.GenerateDone(generated, self._traffic_since(before))
        if isinstance(command, messages.GenerateAlone):
            generated = self._alone.generate(command.prompt, command.n_new, self._progress)
            return messages.GenerateDone(generated, [])
        return self._members()

    def say(self, answer: messages.Answer) -> None:
        """Write one line to whoever started this process."""
        self._answers.write(msgspec.json.encode(answer) + b"\n")
        self._answers.flush()

    def _progress(self, what: str, n_done: int, n_all: int) -> None:
        self.say(messages.Progress(what, n_done, n_all))

    def _members(self) -> messages.Members:
        return messages.Members(
            [
                messages.Member(m.node_id, m.state.name.lower(), m.address, ", ".join(m.transports))
                for m in self._node.members()
            ]
        )

    def _traffic(self) -> dict[tuple[str, str], messages.Traffic]:
        """All that this node has fetched so far, by the node it came from and the transport."""
        ways = [
            messages.Traffic(p.node_id, p.transport, p.n_pages, p.nbytes, p.seconds)
            for p in self._node.peers()
        ]
        if self._is_attached:
            counters = self._node.counters()
            n_pages, nbytes = (
                int(counters[f'p2pkv_fetched_{what}_total{{source="own_pool"}}'])
                for what in ("pages", "bytes")
            )
            ways.append(messages.Traffic(messages.OWN_HOST, "mapped", n_pages, nbytes, 0.0))
        return {(way.source, way.transport): way for way in ways}

    def _traffic_since(self, before: dict[tuple[str, str], messages.Traffic]) -> list[messages.Traffic]:
        moved = []
        for way, now in self._traffic().items():
            then = before.get(way, messages.Traffic(*way, 0, 0, 0.0))
            if now.n_pages > then.n_pages:
                moved.append(
                    messages.Traffic(
                        *way,
                        n_pages=now.n_pages - then.n_pages,
                        nbytes=now.nbytes - then.nbytes,
                        seconds=now.seconds - then.seconds,
                    )
                )
        return moved


def main() -> int:
    """Run a worker until its stdin ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.worker", description=__doc__)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--join", required=True, help="HOST:PORT at which the nodes of the demo meet")
    parser.add_argument(
        "--attach", default="", help="unix:PATH of the host's node; without it a node of its own"
    )
    parser.add_argument("--sabotage", action="store_true", help="spoil fetched KV (for tests)")
    parser.add_argument("--small", action="store_true", help="a small model (for tests)")
    options = parser.parse_args()
    answers = claim_stdout()
    model = Model(SMALL if options.small else Shape())
    try:
        node = Node.start(
            Config(
                node_id=options.node_id,
                join=[options.join],
                pool_size=POOL_SIZE,
                attach=options.attach,
                namespace=f"demo/{model.shape.describe()}",
                membership="embedded",
            )
        )
        try:
            worker = Worker(model, node, answers, is_attached=bool(options.attach))
            worker.warm_up()
            worker.say(messages.Ready())
            for line in sys.stdin.buffer:
                command = msgspec.json.decode(line, type=messages.Command)
                worker.say(worker.run(command, sabotage=options.sabotage))
        finally:
            node.close()
    except (P2PKVError, OutOfPagesError) as error:
        answers.write(msgspec.json.encode(messages.Failed(str(error))) + b"\n")
        answers.flush()
        return 1
    return 0


def _keep(_spans: Spans) -> None:
    """Leave the fetched pages as they are."""


def _flip_a_bit(spans: Spans) -> None:
    """Flip the highest exponent bit of the first V value of the first fetched page."""
    if len(spans):
        ctypes.c_uint8.from_address(int(spans[0, 1, 0]) + 3).value ^= 0x40


if __name__ == "__main__":
    sys.exit(main())
