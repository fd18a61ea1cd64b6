"""What the indexer says of a prompt is what pools and disks have, once nothing changes any more.

Three nodes with small pools, some with disks, publish, take back, clear, bump, fetch and are closed and started again;
a publish into a full pool evicts, to the disk where there is one. Now and then everybody waits, and a node is asked
over HTTP who has how much of a prompt: by page ids, and by the names of pages of registered instances. Within a while
the answer has to be what looking into every pool and disk gives.
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node, page_key

PAGE = 8192
POOL = 10 * PAGE
N_KEYS = 24
BATCH = 8
BLOCK = 16
TIMEOUT = 5.0
QUIET_S = 30.0
"""How long an answer may take to be true; milliseconds are usual, and a busy machine stops for seconds."""


@dataclass
class Known:
    """One node, and where its disk is, if it has one."""

    node_id: str
    disk: Path | None
    memory: np.ndarray
    node: Node | None = None

    def has(self, keys: list[str]) -> list[str]:
        """Look where each page is here, without asking what is hunted: ``pool``, ``disk`` or nowhere."""
        assert self.node is not None
        caching = self.node._parts.caching
        assert caching is not None
        _, ids = caching.cache.hash(keys)
        in_pool = caching.pool.lookup(ids)[0].tolist()
        on_disk = caching.tier.contains(ids).tolist() if caching.tier is not None else [0] * len(keys)
        return [
            "pool" if here else "disk" if there else "" for here, there in zip(in_pool, on_disk, strict=True)
        ]


@dataclass(frozen=True)
class Runs:
    """What one node is said to have, or has: blocks from the first one on."""

    cpu: int
    disk: int


class World:
    """One schedule: its nodes and what was done with them."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.nodes = [
            Known(
                f"n{i}",
                folder / f"disk{i}" if chance.random() < 0.5 else None,
                np.zeros((N_KEYS, PAGE), np.uint8),
            )
            for i in range(3)
        ]

    def start(self, known: Known) -> None:
        others = [other.node.address for other in self.nodes if other.node is not None]
        disk = {} if known.disk is None else {"disk_size": 8 << 20, "disk_path": str(known.disk)}
        known.node = Node.start(
            Config(
                node_id=known.node_id,
                pool_size=POOL,
                buffer_size=0,
                deadline=TIMEOUT,
                join=others,
                indexer="127.0.0.1:0",
                **disk,  # type: ignore[arg-type]
            )
        )
        known.node.register_memory(known.memory)
        for (
            other
        ) in self.nodes:  # each is an instance of its own name, which names its pages as they were published
            told = {"instance_id": f"engine-{other.node_id}", "model": "named", "block_size": BLOCK}
            self.post(known, "/register", {**told, "namespace": "default", "node_ids": [other.node_id]})

    def present(self) -> list[Known]:
        return [known for known in self.nodes if known.node is not None]

    def wait_met(self) -> None:
        until = time.monotonic() + 60
        while any(len(known.node.members()) != len(self.present()) for known in self.present() if known.node):
            if time.monotonic() > until:
                raise self.broken("the nodes have not met within 60 s")
            time.sleep(0.005)  # looked at again; nobody says so

    def some(self) -> list[str]:
        first = self.chance.randrange(N_KEYS)
        return [f"k{(first + i) % N_KEYS}" for i in range(self.chance.randint(1, BATCH))]

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-40:]]))

    def post(self, known: Known, path: str, body: dict[str, object]) -> Any:
        assert known.node is not None
        assert known.node.indexer_port is not None
        connection = HTTPConnection("127.0.0.1", known.node.indexer_port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            told = json.loads(answer.read())
            if answer.status != 200:
                raise self.broken(f"{path} of {body} was answered with {answer.status}: {told}")
            return told
        finally:
            connection.close()

    # --- steps

    def publish(self) -> None:
        known, keys = self.chance.choice(self.present()), self.some()
        assert known.node is not None
        self.story.append(f"{known.node_id} publishes {keys}")
        known.node.publish(keys, known.memory[: len(keys)])

    def fetch(self) -> None:
        known, keys = self.chance.choice(self.present()), self.some()
        assert known.node is not None
        self.story.append(f"{known.node_id} fetches {keys}")
        known.node.fetch(keys, known.memory[: len(keys)])

    def retract(self) -> None:
        known, keys = self.chance.choice(self.present()), self.some()
        assert known.node is not None
        self.story.append(f"{known.node_id} retracts {keys}")
        known.node.retract(keys)

    def clear(self) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        self.story.append(f"{known.node_id} clears")
        known.node.clear()

    def bump(self) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        self.story.append(f"{known.node_id} bumps")
        known.node.bump()
        self.tally["bumps"] += 1

    def restart(self) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        self.story.append(f"{known.node_id} is closed and started")
        known.node.close()
        known.node = None
        self.wait_met()
        if known.disk is not None and self.chance.random() < 0.5:
            shutil.rmtree(known.disk, ignore_errors=True)
        self.start(known)
        self.wait_met()
        self.tally["restarts"] += 1

    # --- the oracle

    def look(self) -> None:
        """Ask one node of one prompt until its answer is what is there."""
        asked, by_name = self.chance.choice(self.present()), self.chance.random() < 0.5
        first = self.chance.randrange(N_KEYS)
        keys = [f"k{(first + i) % N_KEYS}" for i in range(self.chance.randint(1, 2 * BATCH))]
        until = time.monotonic() + QUIET_S
        while True:
            before = {known.node_id: known.has(keys) for known in self.present()}
            said, external = self.ask(asked, keys, by_name=by_name)
            after = {known.node_id: known.has(keys) for known in self.present()}
            wrong = self.judge(keys, after, said, external) if before == after else "things still change"
            if wrong is None:
                return
            if time.monotonic() > until:
                raise self.broken(
                    f"{QUIET_S:g} s after all was quiet {asked.node_id} still says {said}: {wrong}"
                )
            self.tally["not yet"] += 1
            time.sleep(0.002)  # asked again; nobody says when evictions have been told

    def ask(self, asked: Known, keys: list[str], *, by_name: bool) -> tuple[dict[str, Runs], set[int]]:
        assert asked.node is not None
        epoch = asked.node.epoch
        hashes = keys if by_name else [page_key("default", key, epoch).hex() for key in keys]
        model = "named" if by_name else "ids"
        body = {"model": model, "block_size": BLOCK, "seq_hashes": hashes}
        told = self.post(asked, "/query_by_hash", body)["default"]
        said = {
            name.removeprefix("engine-"): Runs(each["CPU"] // BLOCK, each["DISK"] // BLOCK)
            for name, each in told.items()
        }
        return said, {each["EXTERNAL"] // BLOCK for each in told.values()}

    def judge(
        self, keys: list[str], places: dict[str, list[str]], said: dict[str, Runs], external: set[int]
    ) -> str | None:
        """Say what is wrong with an answer, if something is."""
        holders = [sum(1 for has in places.values() if has[at]) for at in range(len(keys))]
        there = _leading([n > 0 for n in holders])
        if external != {there}:
            return f"{there} blocks are there for all, {external} are said to be: {places}"
        is_exact = max(holders[:there], default=0) <= 1  # of several copies the directory names one
        for node_id, has in places.items():
            true = Runs(_leading([each == "pool" for each in has]), _leading([each != "" for each in has]))
            claim = said[node_id]
            if claim.cpu > true.cpu or claim.disk > true.disk or (is_exact and claim != true):
                return f"{node_id} has {true}, and is said to have {claim}: {places}"
        best = max(said.values(), key=lambda each: each.disk)
        if there and not best.disk:
            return f"somebody has the first block, and nobody is said to: {places}"
        self.tally["exact" if is_exact else "copies"] += 1
        self.tally["in_pool"] += best.cpu > 0
        self.tally["on_disk"] += best.disk > best.cpu
        self.tally["nowhere"] += not there
        return None


def _leading(is_there: list[bool]) -> int:
    return next((at for at, each in enumerate(is_there) if not each), len(is_there))


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="p2pkv-hunt-"))
    world = World(chance, tally, folder)
    steps: list[tuple[Callable[[], None], float]] = [
        (world.publish, 8),
        (world.look, 8),
        (world.fetch, 2),
        (world.retract, 2),
        (world.clear, 0.7),
        (world.bump, 0.7),
        (world.restart, 0.5),
    ]
    try:
        for known in world.nodes:
            world.start(known)
        world.wait_met()
        what, weights = zip(*steps, strict=True)
        for _ in range(chance.randint(10, 60)):
            if stop():
                break
            chance.choices(what, weights)[0]()
        world.look()
    finally:
        for known in world.nodes:
            if known.node is not None:
                known.node.close()
                known.node = None
        gc.collect()  # what a node has open goes with the object
        shutil.rmtree(folder, ignore_errors=True)


HUNT = Hunt(
    "indexer",
    "Once nothing changes, the indexer says who has how much of a prompt as pools and disks have it",
    run,
    effects=("exact", "copies", "in_pool", "on_disk", "nowhere", "bumps", "restarts"),
    enough=30,
)
