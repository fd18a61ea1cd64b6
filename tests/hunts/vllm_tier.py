"""A tier of vLLM's offloading brings chunks as they were computed, with these weights and since the last bump, or none.

Some servers, each with host memory of vLLM's and a node with a small pool, store chunks and load those of others. A
chunk's memory is somebody else's as soon as its job has been reported. Meanwhile vLLM forgets its KV for other weights,
the namespace is bumped, and servers end and start again. Every chunk says what it was computed from.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import offloading
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.integrations.vllm_connector.weights import Weights
from p2pkv.integrations.vllm_tier import P2PKVTier

N_KEYS, N_SLOTS, BATCH = 60, 96, 10
ANSWERED_S = 30.0
_OTHERS = b"somebody else's"
_VERSIONS = ("v1", "v2")


@dataclass
class Asked:
    """A job, and what its chunks must hold."""

    keys: list[bytes]
    slots: list[int]
    is_load: bool
    weights: str
    n_bumps: int


class Server:
    """A tier, its host memory, and what vLLM would know of it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.memory = offloading.Memory(N_SLOTS)
        self.weights = "the first"
        self.heard = Weights()
        self.free = list(range(N_SLOTS))
        self.asked: dict[int, Asked] = {}
        self.n_jobs = self.n_requests = 0
        for slot in self.free:
            self.memory.write(slot, _OTHERS)
        joins = [other.tier.node.address for other in world.servers if other is not None]
        name = f"n{number}-{world.chance.getrandbits(32)}"
        self.tier: P2PKVTier = offloading.tier(self.memory, weights=self.heard, node_id=name, join=joins)

    def seed(self, key: bytes, weights: str, n_bumps: int) -> bytes:
        return b"%s %s %d" % (key, weights.encode(), n_bumps)

    def take(self, n: int) -> list[int]:
        slots, self.free = self.free[:n], self.free[n:]
        for slot in slots:
            if not self.memory.holds(slot, _OTHERS):
                raise Broken(f"somebody writes to chunk {slot}, of which no job is under way")
        return slots

    def give_back(self, slots: list[int]) -> None:
        """Somebody else computes there at once."""
        for slot in slots:
            self.memory.write(slot, _OTHERS)
        self.free += slots

    def submit(self, keys: list[bytes], slots: list[int], *, is_load: bool) -> None:
        self.n_jobs += 1
        self.asked[self.n_jobs] = Asked(keys, slots, is_load, self.weights, self.world.n_bumps)
        start = self.tier.submit_load if is_load else self.tier.submit_store
        start(offloading.job(self.n_jobs, keys, slots))

    def hear(self) -> None:
        for result in self.tier.get_finished_jobs():
            asked = self.asked.pop(result.job_id, None)
            if asked is None:
                raise Broken(f"job {result.job_id} is reported twice, or was never asked for")
            if asked.is_load:
                self.judge(asked, result)
            else:
                self.world.tally["stored" if result.success else "not stored"] += 1
            self.give_back(asked.slots)

    def judge(self, asked: Asked, result: Any) -> None:
        came = asked.keys if result.success else result.successful_keys or ()
        self.world.tally["loaded chunks"] += len(came)
        self.world.tally["chunks that were gone"] += len(asked.keys) - len(came)
        for key, slot in zip(asked.keys, asked.slots, strict=True):
            # a load that was under way when the namespace was bumped may bring what was there before
            bumps = range(asked.n_bumps, self.world.n_bumps + 1)
            right = (self.seed(key, asked.weights, n) for n in bumps)
            if key in came and not any(self.memory.holds(slot, seed) for seed in right):
                raise Broken(f"{key!r} of {asked.weights} after {asked.n_bumps} bumps has other bytes")


class World:
    """The servers, and how often their namespace was bumped."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.chance, self.tally = random.Random(seed), tally
        self.n_bumps = self.n_resets = 0
        self.servers: list[Server | None] = []
        for number in range(self.chance.choice([1, 2, 3])):
            self.servers.append(Server(self, number))

    def some(self) -> Server:
        return self.chance.choice(list(self.alive()))

    def alive(self) -> Iterator[Server]:
        return (server for server in self.servers if server is not None)

    def keys(self, most: int = BATCH) -> list[bytes]:
        first = self.chance.randrange(N_KEYS)
        return [b"%032d" % ((first + i) % N_KEYS) for i in range(self.chance.randint(1, max(1, most)))]

    def store(self) -> None:
        server, keys = self.some(), self.keys()
        if len(server.free) >= len(keys):
            slots = server.take(len(keys))
            for slot, key in zip(slots, keys, strict=True):
                server.memory.write(slot, server.seed(key, server.weights, self.n_bumps))
            server.submit(keys, slots, is_load=False)

    def load(self) -> None:
        server, keys = self.some(), self.keys()
        found = self.look_up(server, keys)
        # what is not there is asked for all the same: it may have gone since
        wanted = [key for key in keys if key in found or self.chance.random() < 0.1]
        if wanted and len(server.free) >= len(wanted):
            server.submit(wanted, server.take(len(wanted)), is_load=True)

    def look_up(self, server: Server, keys: list[bytes]) -> set[bytes]:
        server.n_requests += 1
        request, until = offloading.request(f"r{server.n_requests}"), time.monotonic() + ANSWERED_S
        while True:
            answers = {key: server.tier.lookup(key, request).name for key in keys}
            server.tier.on_schedule_end(None)
            if "RETRY" not in answers.values():
                break
            if time.monotonic() > until:
                raise Broken(f"not known after {ANSWERED_S:.0f} s whether {len(keys)} chunks are there")
            time.sleep(0.001)
        server.tier.on_request_finished(request)
        self.tally["found" if "HIT" in answers.values() else "not found"] += 1
        return {key for key, answer in answers.items() if answer == "HIT"}

    def hear(self) -> None:
        self.some().hear()

    def replace_weights(self) -> None:
        """The weights are others, and vLLM forgets its KV; a version may be told, and then others have them too."""
        server = self.some()
        server.tier.drain_jobs()
        server.hear()
        if server.asked:
            raise Broken(f"{len(server.asked)} jobs are under way when all should have ended")
        self.n_resets += 1
        server.weights = f"reset {self.n_resets}"
        if self.chance.random() < 0.7:
            server.weights = self.chance.choice(_VERSIONS)
            server.heard.told(server.weights)
        self.tally["updates of weights"] += 1

    def bump(self) -> None:
        # who has just come or gone may not answer yet
        if not any(not self.some().tier.node.bump(timeout=10.0).unreached for _ in range(5)):
            raise Broken("five bumps, of none of which all nodes have heard")
        self.n_bumps += 1
        self.tally["bumps"] += 1

    def restart(self) -> None:
        if len(self.servers) > 1:
            server = self.some()
            number = self.servers.index(server)
            server.tier.shutdown()
            server.hear()
            if server.asked:
                raise Broken(f"{len(server.asked)} jobs are never reported")
            self.servers[number] = None
            self.servers[number] = Server(self, number)
            self.tally["restarts"] += 1

    def settle(self) -> None:
        """Every job is reported."""
        until = time.monotonic() + ANSWERED_S
        for server in self.alive():
            while server.asked:
                server.hear()
                if time.monotonic() > until:
                    raise Broken(f"{len(server.asked)} jobs are not reported after {ANSWERED_S:.0f} s")
                time.sleep(0.001)

    def close(self) -> None:
        for server in self.alive():
            server.tier.shutdown()


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    world = World(seed, tally)
    often = [world.store, world.load, world.hear] * 12
    seldom = [world.replace_weights, world.bump, world.restart]
    try:
        for _ in range(world.chance.randrange(20, 200)):
            if stop():
                break
            world.chance.choice(often + seldom)()
        world.settle()
    finally:
        world.close()
        del world, often, seldom  # servers and tiers know each other in circles
        gc.collect()


HUNT = Hunt(
    name="vllm_tier",
    promise="a tier of vLLM's offloading brings chunks of these weights or none, and reports each job once",
    run=run,
    effects=("loaded chunks", "chunks that were gone", "stored", "updates of weights", "bumps", "restarts"),
    enough=30,
)
