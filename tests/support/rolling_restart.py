"""Nodes under load that are restarted one after the other, and what share of the pages asked for is found meanwhile."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from cluster import Cluster, NodeProcess, eventually

if TYPE_CHECKING:
    from typing_extensions import Self

PAGE = 64 * 1024
BATCH = 8
_FETCH_S = 10.0
"""Of each: a machine that is busy for seconds is no failure of a node."""
_LOST = ("peer_lost", "timed_out", "checksum", "unreadable")
"""Reasons of misses that are failures: the page was there, and could not be read. The others say that it was not."""


@dataclass
class Found:
    """What a stretch of time has seen. ``wrong`` are keys of pages with wrong bytes."""

    n_asked: int = 0
    n_hits: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.n_hits / max(1, self.n_asked)


class Loaded:
    """One node, and the thread that asks it for pages, publishes those it misses, and restarts it when told to."""

    def __init__(self, world: RollingRestart, node_id: str) -> None:
        self.world = world
        self.node_id = node_id
        self.chance = random.Random(f"{world.seed} {node_id}")
        self.process = self._start()
        self.to_restart = threading.Event()
        self.restarted = threading.Event()
        self.drained: dict[str, object] = {}
        self.thread = threading.Thread(target=self._run)

    def _start(self) -> NodeProcess:
        process = self.world.cluster.spawn(
            self.node_id, memory=BATCH * PAGE, pool_size=self.world.n_pages * PAGE, buffer_size=0
        )
        return process.start()

    def _run(self) -> None:
        try:
            while not self.world.is_over.is_set():
                if self.to_restart.is_set():
                    self._restart()
                self._ask()
        except BaseException as error:  # noqa: BLE001  # told to the thread that waits
            self.world.failed(error)

    def _ask(self) -> None:
        keys = self.world.draw(self.chance)
        answer = self.process.call("fetch", keys=keys, nbytes=PAGE, timeout=_FETCH_S)
        self.world.note(answer["hits"], answer["wrong"])
        missed = [key for key, is_hit in zip(keys, answer["hits"], strict=True) if not is_hit]
        if missed:  # as an engine does, which computes it
            self.process.call("publish", keys=missed, nbytes=PAGE)

    def _restart(self) -> None:
        self.drained = self.process.call("drain", seconds=self.world.drain_s)
        self._note_failures()
        self.process.call("close")
        self.process.close()
        self.process = self._start()
        self._meet()
        self.to_restart.clear()
        self.restarted.set()

    def _meet(self) -> None:
        """Wait until the node knows the others, as ``/readyz`` says it: an engine is given no work before.

        It would miss all that they have, and publish that again into the room that is for the pages of the next one.
        """
        ids = {node.node_id for node in self.world.nodes}

        def knows_all() -> bool:
            return ids <= {m["node_id"] for m in self.process.call("members") if m["state"] == "ALIVE"}

        eventually(knows_all, 10.0)

    def _note_failures(self) -> None:
        counters = self.process.call("counters")
        for reason in _LOST:
            if n := counters[f'p2pkv_missed_pages_total{{reason="{reason}"}}']:
                self.world.failures[f"{self.node_id}: {reason}"] = n

    def stop(self) -> None:
        self.thread.join()
        self._note_failures()


class RollingRestart:
    """A cluster of ``n_nodes`` with pools of ``n_pages`` each; of ``n_keys`` keys some are asked for more often."""

    def __init__(
        self,
        *,
        n_nodes: int,
        n_pages: int,
        n_keys: int,
        skew: float,
        drain_s: float,
        seed: int = 1,
        transport: str = "tcp",
    ) -> None:
        """``skew``: the exponent of Zipf's law; 0: all are asked for as often."""
        self.n_pages, self.drain_s, self.seed = n_pages, drain_s, seed
        self.n_keys = n_keys
        self._weights = list(accumulate(1 / (rank + 1) ** skew for rank in range(n_keys)))
        self.cluster = Cluster(transports=[transport])
        self.is_over = threading.Event()
        self.failures: dict[str, float] = {}
        self._changed = threading.Condition()  # its lock guards what follows
        self._found = Found()
        self._error: BaseException | None = None
        self.nodes = [Loaded(self, f"n{i}") for i in range(n_nodes)]
        self.cluster.meet(*(node.process for node in self.nodes))

    def draw(self, chance: random.Random) -> list[str]:
        drawn = chance.choices(range(self.n_keys), cum_weights=self._weights, k=BATCH)
        return [f"page {i}" for i in dict.fromkeys(drawn)]

    def note(self, hits: list[int], wrong: list[str]) -> None:
        with self._changed:
            self._found.n_asked += len(hits)
            self._found.n_hits += sum(hits)
            self._found.wrong += wrong
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def fill(self) -> None:
        """Publish each page somewhere."""
        for i, node in enumerate(self.nodes):
            keys = [f"page {k}" for k in range(i, self.n_keys, len(self.nodes))]
            for first in range(0, len(keys), BATCH):
                node.process.call("publish", keys=keys[first : first + BATCH], nbytes=PAGE)

    def begin(self) -> None:
        for node in self.nodes:
            node.thread.start()

    def ask(self, n: int) -> Found:
        """Let them ask for so many pages more; return what was found of those asked for since the last call."""
        with self._changed:
            until = self._found.n_asked + n
            assert self._changed.wait_for(lambda: self._error or self._found.n_asked >= until, 120.0)
            if self._error is not None:
                raise self._error
            found, self._found = self._found, Found()
            return found

    def restart_all(self) -> tuple[Found, float]:
        """Restart one after the other, each when the one before is there again; return what was found, and seconds."""
        began = time.monotonic()
        for node in self.nodes:
            node.restarted.clear()
            node.to_restart.set()
            eventually(lambda node=node: node.restarted.is_set() or self._error is not None, 60.0)
        return self.ask(1), time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_over.set()
        for node in self.nodes:
            if node.thread.is_alive():
                node.thread.join()
        if exc_info[0] is None:
            for node in self.nodes:
                node.stop()
        self.cluster.close()
