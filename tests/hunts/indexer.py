"""What the indexer says of a prompt is what pools and disks have, once nothing changes any more.

Three nodes with small pools, some with disks, publish, take back, clear, bump, fetch and are closed and started again;
a publish into a full pool evicts, to the disk where there is one. Now and then everybody waits, and a node is asked
over HTTP who has how much of a prompt: by page ids, and by the names of pages of registered instances. Within a while
the answer has to be what looking into every pool and disk gives.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from hunts.few_nodes import FewNodes, Known
from hunts.frame import Hunt, Stop, Tally
from hunts.schedules import Step, drawn, scratch, turns
from p2pkv import page_key

BLOCK = 16
QUIET_S = 30.0
"""How long an answer may take to be true; milliseconds are usual, and a busy machine stops for seconds."""


@dataclass(frozen=True)
class Runs:
    """What one node is said to have, or has: blocks from the first one on."""

    cpu: int
    disk: int


class World(FewNodes):
    """One schedule: its nodes and what was done with them."""

    batch = 8

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        super().__init__(chance, tally, folder, n_nodes=3, share_of_disks=0.5)

    def start(self, known: Known, **settings: object) -> None:
        super().start(known, indexer="127.0.0.1:0", **settings)
        # each is an instance of its own name, which names its pages as they were published
        for other in self.nodes:
            told = {"instance_id": f"engine-{other.node_id}", "model": "named", "block_size": BLOCK}
            self.post(known, "/register", {**told, "namespace": "default", "node_ids": [other.node_id]})

    def post(self, known: Known, path: str, body: dict[str, object]) -> Any:
        assert known.there.indexer_port is not None
        connection = HTTPConnection("127.0.0.1", known.there.indexer_port, timeout=60)
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
        known, keys = self.one(), self.some()
        self.story.append(f"{known.node_id} publishes {keys}")
        known.there.publish(keys, known.memory[: len(keys)])

    def fetch(self) -> None:
        known, keys = self.one(), self.some()
        self.story.append(f"{known.node_id} fetches {keys}")
        known.there.fetch(keys, known.memory[: len(keys)])

    def retract(self) -> None:
        known, keys = self.one(), self.some()
        self.story.append(f"{known.node_id} retracts {keys}")
        known.there.retract(keys)

    def clear(self) -> None:
        known = self.one()
        self.story.append(f"{known.node_id} clears")
        known.there.clear()

    def bump(self) -> None:
        known = self.one()
        self.story.append(f"{known.node_id} bumps")
        known.there.bump()
        self.tally["bumps"] += 1

    def restart(self) -> None:
        known = self.one()
        self.story.append(f"{known.node_id} is closed and started")
        self.close(known)
        self.wait_met()
        if known.disk is not None and self.chance.random() < 0.5:
            self.lose_disk(known)
        self.start(known)
        self.wait_met()
        self.tally["restarts"] += 1

    # --- the oracle

    def look(self) -> None:
        """Ask one node of one prompt until its answer is what is there."""
        asked, by_name = self.one(), self.chance.random() < 0.5
        keys = self.some(2 * self.batch)
        until = time.monotonic() + QUIET_S
        while True:
            before = {known.node_id: known.places(keys) for known in self.present()}
            said, external = self.ask(asked, keys, by_name=by_name)
            after = {known.node_id: known.places(keys) for known in self.present()}
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
        epoch = asked.there.epoch
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
    with scratch() as folder:
        world = World(chance, tally, folder)
        steps: list[tuple[Step, float]] = [
            (world.publish, 8),
            (world.look, 8),
            (world.fetch, 2),
            (world.retract, 2),
            (world.clear, 0.7),
            (world.bump, 0.7),
            (world.restart, 0.5),
        ]
        try:
            world.start_all()
            for _ in turns(chance.randint(10, 60), stop):
                drawn(chance, steps)()
            world.look()
        finally:
            world.close_all()


HUNT = Hunt(
    "indexer",
    "Once nothing changes, the indexer says who has how much of a prompt as pools and disks have it",
    run,
    effects=("exact", "copies", "in_pool", "on_disk", "nowhere", "bumps", "restarts"),
    enough=30,
)
