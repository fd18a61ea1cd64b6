"""A node that runs out of something costs misses: its own, while it lasts, and nobody else's pages.

Three nodes with pages of their own: two in this process, and one in another, from which descriptors, address space,
locked memory or the room on its disk are taken at random moments and given back. Meanwhile all three publish, look up
and fetch. Oracle: no call raises or hangs, no byte is wrong, what the healthy two have is found by each other
throughout, and by all three soon after the limit is back; then nothing is pinned, and the process that was short is
back at its descriptors, threads and mappings.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import pages
from cluster import NodeProcess
from footprint import Footprint
from hunts.frame import Broken, Hunt, Stop, Tally
from limits import LIMITS, Limit
from p2pkv import Config, Node
from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import RefusedError

NBYTES = 4096
BATCH = 8
DEADLINE_S = 1.0
HANGS_S = 20.0
"""Past its deadline a call counts as hung; far above what a busy machine adds."""
RECOVERS_S = 45.0
"""A guess: transports and channels that failed for long are tried again after 30 s."""
SLACK_FDS = 24
"""Connections that were opened since, and are kept for a while: to two peers, for control, channels and pages."""


class Healthy:
    """A node of this process: it must never miss what a healthy node has."""

    def __init__(self, name: str, settings: dict[str, object], undo: ExitStack) -> None:
        self.name = name
        self.node = undo.enter_context(Node.start(Config.load(settings | {"node_id": name}, environ={})))
        self.memory = np.zeros((BATCH, NBYTES), np.uint8)
        undo.enter_context(self.node.register_memory(self.memory))

    def publish(self, keys: list[str]) -> None:
        rows = self.memory[: len(keys)]
        pages.fill(rows, keys)
        self.node.publish(keys, rows, timeout=DEADLINE_S)

    def fetch(self, keys: list[str]) -> list[int]:
        rows = self.memory[: len(keys)]
        outcomes = self.node.fetch(keys, rows, timeout=DEADLINE_S)
        if wrong := pages.wrong(rows, keys, outcomes):
            raise Broken(f"{self.name} was given wrong bytes for {wrong}")
        return [int(outcome) for outcome in outcomes]


class Short:
    """The node whose limits are taken away."""

    def __init__(self, settings: dict[str, object], folder: Path, undo: ExitStack) -> None:
        below = {"disk_path": str(folder / "disk"), "disk_size": "8MiB"}
        self.process = NodeProcess(config=settings | below | {"node_id": "short"}, memory=BATCH * NBYTES)
        undo.callback(self.process.close)
        self.process.start()

    def call(self, command: str, **arguments: object) -> object:
        began = time.monotonic()
        try:
            answer = self.process.call(command, patience=DEADLINE_S + HANGS_S, **arguments)
        except TimeoutError as late:
            code = self.process._process.poll()
            how = "hangs" if code is None else f"ends its process with {code}"
            raise Broken(f"{command} of the node that is short of something {how}: {late}") from None
        except RefusedError as error:
            raise Broken(f"{command} raised where a miss was promised: {error}") from error
        except (OSError, ValueError) as error:
            raise Broken(f"the node that is short of something died in {command}: {error}") from error
        if time.monotonic() - began > DEADLINE_S + HANGS_S:
            raise Broken(f"{command} took {time.monotonic() - began:.1f} s")
        return answer

    def publish(self, keys: list[str]) -> None:
        self.call("publish", keys=keys, nbytes=NBYTES, timeout=DEADLINE_S)

    def fetch(self, keys: list[str]) -> list[int]:
        answer = self.call("fetch", keys=keys, nbytes=NBYTES, timeout=DEADLINE_S)
        assert isinstance(answer, dict)
        if answer["wrong"]:
            raise Broken(f"the node that is short of something was given wrong bytes for {answer['wrong']}")
        hits: list[int] = answer["hits"]
        return hits

    def members(self) -> set[str]:
        members = self.call("members")
        assert isinstance(members, list)
        return {member["node_id"] for member in members}


class Schedule:
    """One seed's nodes, and what they have published."""

    def __init__(self, seed: int, tally: Tally, undo: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.steps: list[str] = []
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        secret = folder / "secret"
        secret.write_text("the secret of a hunt, long enough\n")
        secret.chmod(0o600)
        settings: dict[str, object] = {
            "secret_file": str(secret),
            "join": [f"127.0.0.1:{free_port()}"],
            "pool_size": "16MiB",
            "buffer_size": 0,
            "transports": self.rng.choice([["shm", "tcp"], ["shm"], ["tcp"]]),
        }
        self.settings = settings
        self.n_newcomers = 0
        self.healthy = [Healthy(name, settings, undo) for name in ("a", "b")]
        self.short = Short(settings, folder, undo)
        self.batches: list[tuple[str, list[str]]] = []  # whose, and keys
        until(lambda: all(len(node.node.members()) == 3 for node in self.healthy), "the nodes don't meet")
        for node in self.healthy:
            self.publish(node.name)

    def publish(self, who: str) -> None:
        keys = [f"{who}-{len(self.batches)}-{i}" for i in range(self.rng.randint(1, BATCH))]
        by = self.short if who == "short" else next(node for node in self.healthy if node.name == who)
        by.publish(keys)
        self.batches.append((who, keys))
        self.tally["publishes"] += 1

    def of_healthy(self) -> list[str]:
        return self.rng.choice([keys for who, keys in self.batches if who != "short"])

    def step(self) -> None:
        kind = self.rng.choice(
            ["publish", "short fetches", "short looks up", "healthy fetch", "fetch from short", "newcomer"]
        )
        self.steps.append(kind)
        if kind == "publish":
            self.publish(self.rng.choice(["a", "b", "short", "short"]))
        elif kind == "short fetches":
            self.short_fetches(self.of_healthy())
        elif kind == "newcomer":
            self.newcomer_comes()
        elif kind == "short looks up":
            self.short.call("exists", keys=self.of_healthy(), timeout=DEADLINE_S)
        elif kind == "healthy fetch":
            self.healthy_have_all(self.of_healthy())
        else:
            of_short = [keys for who, keys in self.batches if who == "short"]
            if of_short:
                self.rng.choice(self.healthy).fetch(self.rng.choice(of_short))

    def short_fetches(self, keys: list[str]) -> None:
        hits = self.short.fetch(keys)
        self.tally["hits while short"] += sum(hits)
        self.tally["misses while short"] += len(hits) - sum(hits)

    def newcomer_comes(self) -> None:
        """Have the short node fetch from one that it has no connection to: what that takes may not be there."""
        self.n_newcomers += 1
        with ExitStack() as undo:
            node = Healthy(f"newcomer-{self.n_newcomers}", self.settings, undo)
            keys = [f"{node.name}-{i}" for i in range(BATCH)]
            node.publish(keys)
            until(lambda: node.name in self.short.members(), f"short does not learn of {node.name}", self)
            self.short_fetches(keys)

    def healthy_have_all(self, keys: list[str]) -> None:
        """A healthy node's pages are found by the other, whatever the third is short of."""
        reader = self.rng.choice(self.healthy)
        # again for a while, because a look-up may wait for the short one's shard, which does not answer
        until(lambda: all(reader.fetch(keys)), f"{reader.name} misses pages of healthy nodes: {keys}", self)
        self.tally["hits beside"] += len(keys)

    def take_away_and_give_back(self, limit: Limit) -> None:
        pid = self.short.process.pid
        self.steps.append(f"no {limit.name}")
        before = limit.take_away(pid)
        try:
            for _ in range(self.rng.randint(1, 5)):
                self.step()
        finally:
            if self.short.process._process.poll() is None:
                limit.give_back(pid, before)
        self.steps.append(f"{limit.name} back")
        self.tally[f"no {limit.name}"] += 1

    def all_is_well(self) -> None:
        """Everything works again: what healthy nodes have is had by all, and what is published now as well."""
        for who, keys in [batch for batch in self.batches if batch[0] != "short"]:
            until(lambda keys=keys: all(self.short.fetch(keys)), f"short misses {who}'s {keys}", self)  # type: ignore[misc]
            self.healthy_have_all(keys)
        self.publish("short")
        keys = self.batches[-1][1]
        for node in self.healthy:
            until(lambda node=node: all(node.fetch(keys)), f"{node.name} misses short's {keys}", self)  # type: ignore[misc]
        for node in self.healthy:
            until(
                lambda node=node: node.node.counters()["p2pkv_pool_pinned_bytes"] == 0,  # type: ignore[misc]
                f"{node.name} keeps pages pinned",
                self,
            )
        self.tally["recoveries"] += 1


def until(condition: Callable[[], bool], otherwise: str, schedule: Schedule | None = None) -> None:
    """Wait for it, for long; say otherwise."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > RECOVERS_S:
            steps = f"; steps: {', '.join(schedule.steps)}" if schedule is not None else ""
            raise Broken(f"{otherwise} (after {RECOVERS_S:.0f} s){steps}")
        time.sleep(0.02)  # between two looks


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Take limits away and give them back, a few times."""
    with ExitStack() as undo:
        schedule = Schedule(seed, tally, undo)
        pid = schedule.short.process.pid
        schedule.all_is_well()
        level = Footprint.of(pid)
        for _ in range(schedule.rng.randint(1, 4)):
            schedule.take_away_and_give_back(schedule.rng.choice(LIMITS))
            if stop():
                break
        schedule.all_is_well()
        is_back = lambda: _is_back(Footprint.of(pid), level)  # noqa: E731  # said twice below
        until(is_back, f"{Footprint.of(pid)} for {level} before", schedule)

    del schedule
    gc.collect()  # nodes are in cycles, and keep their memory until those are found


def _is_back(now: Footprint, level: Footprint) -> bool:
    n_more = now.n_fds - level.n_fds
    return (
        n_more <= SLACK_FDS
        and now.n_threads <= level.n_threads + 4
        and now.n_segments <= level.n_segments + 1
    )


HUNT = Hunt(
    name="resources",
    promise="a node that runs out of something costs misses, and nobody else's pages",
    run=run,
    effects=("hits while short", "misses while short", *(f"no {limit.name}" for limit in LIMITS)),
    enough=20,
)
