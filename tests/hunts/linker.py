"""A cache linker of SGLang brings the KV that was computed, for these weights and since the last bump, or nothing.

Some linkers, each a node with a small pool, store pages from device memory and load those of others. Device memory is
somebody else's as soon as SGLang has its answer. Meanwhile weights are replaced, the namespace is bumped, caches are
reset, ranks disagree, and linkers end and start again. Every page says what it was computed from.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections import deque
from typing import Any

import numpy as np

from device_pools import DeviceEntryFake, offered, transfer
from hicache_backends import storage_config
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang_linker import P2PKVLinker

N_KEYS, N_SLOTS, BATCH = 60, 96, 10
ANSWERED_S = 30.0
_VERSIONS = ("v1", "v2")


class Linker(P2PKVLinker):
    """With what SGLang's base class has."""

    def record_offload_ready(self) -> list[Any]:
        return []


class Server:
    """A linker, its device memory, and what SGLang would know of it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.device = DeviceEntryFake(n_pages=N_SLOTS, page_size=4, heads=1)
        self.weights = Weights(_VERSIONS[0])
        self.version = _VERSIONS[0]
        self.free = list(range(N_SLOTS))
        self.asked: deque[list[int]] = (
            deque()
        )  # slots of every offload that has no answer yet, the oldest first
        settings = {
            "pool_size": 1 << 20,
            "deadline": 5.0,
            "node_id": f"n{number}-{world.chance.getrandbits(32)}",
        }
        others = [other.linker.node.address for other in world.servers if other is not None]
        config = storage_config(extra_config=settings | {"join": others})
        what = offered({"kv": self.device}, config, lambda word: word and world.chance.random() < 0.95)
        self.linker = Linker(None, None, components={0}, offered=what, weights=self.weights)

    def write(self, slot: int, seed: bytes) -> None:
        for number, array in enumerate(self.device.arrays):
            array[slot * 4 : slot * 4 + 4].view(np.uint8)[:] = _bytes(seed, number, array[:4].nbytes).reshape(
                array[:4].view(np.uint8).shape
            )

    def holds(self, slot: int, seed: bytes) -> bool:
        return all(
            (
                array[slot * 4 : slot * 4 + 4].view(np.uint8).reshape(-1) == _bytes(seed, n, array[:4].nbytes)
            ).all()
            for n, array in enumerate(self.device.arrays)
        )

    def take(self, n: int) -> list[int]:
        slots, self.free = self.free[:n], self.free[n:]
        return slots

    def give_back(self, slots: list[int]) -> None:
        """Somebody else computes there at once."""
        for slot in slots:
            self.write(slot, b"somebody else's")
        self.free += slots


class World:
    """The servers, and how often their namespace was bumped."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.chance, self.tally = random.Random(seed), tally
        self.n_bumps = 0
        self.servers: list[Server | None] = []
        for number in range(self.chance.choice([1, 2, 3])):
            self.servers.append(Server(self, number))

    def seed_of(self, server: Server, key: str) -> bytes:
        return f"{key} {server.version} {self.n_bumps}".encode()

    def some(self) -> Server:
        return self.chance.choice([server for server in self.servers if server is not None])

    def keys(self, most: int = BATCH) -> list[str]:
        first = self.chance.randrange(N_KEYS)
        return [f"{(first + i) % N_KEYS:064x}" for i in range(self.chance.randint(1, max(1, most)))]

    def store(self) -> None:
        server = self.some()
        keys = self.keys(min(BATCH, len(server.free)))
        slots = server.take(len(keys))
        if len(slots) < len(keys):
            return
        for slot, key in zip(slots, keys, strict=True):
            server.write(slot, self.seed_of(server, key))
        if not server.linker.offload([transfer(keys, server.device.indices(*slots))]):
            raise Broken("an offload is refused, on this rank at least")
        server.asked.append(slots)

    def hear(self) -> None:
        server = self.some()
        for _ in range(server.linker.num_completed_offloads()):
            self.tally["stored" if server.linker.pop_completed_offload() else "not stored"] += 1
            server.give_back(server.asked.popleft())

    def load(self) -> None:
        server, keys = self.some(), self.keys()
        lengths = server.linker.lookup("r", [transfer(keys)])
        keys = keys[: self.chance.choice(lengths) if lengths else len(keys)]
        slots = server.take(len(keys))
        if len(slots) == len(keys):
            if server.linker.load("r", [transfer(keys, server.device.indices(*slots))]):
                for slot, key in zip(slots, keys, strict=True):
                    if not server.holds(slot, self.seed_of(server, key)):
                        raise Broken(f"{key} of {server.version} after {self.n_bumps} bumps has other bytes")
                self.tally["loaded pages"] += len(keys)
            else:
                self.tally["refused loads"] += 1
            server.linker.start_layer_wise_loading()
        server.give_back(slots)

    def replace_weights(self) -> None:
        server = self.some()
        self.reset(server)
        server.version = self.chance.choice(_VERSIONS)
        server.weights.told(server.version, "server")
        self.tally["updates of weights"] += 1

    def reset(self, server: Server | None = None) -> None:
        server = server or self.some()
        server.linker.reset()
        while server.asked:
            server.give_back(server.asked.popleft())
        self.tally["resets"] += 1

    def bump(self) -> None:
        # who has just come or gone may not answer yet
        if not any(not self.some().linker.node.bump(timeout=10.0).unreached for _ in range(5)):
            raise Broken("five bumps, of none of which all nodes have heard")
        self.n_bumps += 1
        self.tally["bumps"] += 1

    def restart(self) -> None:
        if len(self.servers) > 1:
            number = self.servers.index(self.some())
            server = self.servers[number]
            assert server is not None
            server.linker.close()
            self.servers[number] = None
            self.servers[number] = Server(self, number)

    def settle(self) -> None:
        """Every offload has an answer, one each."""
        until = time.monotonic() + ANSWERED_S
        for server in self.servers:
            assert server is not None
            while server.linker.num_completed_offloads() < len(server.asked):
                if time.monotonic() > until:
                    raise Broken(f"{len(server.asked)} offloads have no answers after {ANSWERED_S:.0f} s")
                time.sleep(0.001)
            if server.linker.num_completed_offloads() != len(server.asked):
                raise Broken("more answers than offloads")

    def close(self) -> None:
        for server in self.servers:
            if server is not None:
                server.linker.close()


def _bytes(seed: bytes, number: int, nbytes: int) -> np.ndarray:
    digest = hashlib.blake2b(seed + number.to_bytes(2, "big"), digest_size=32).digest()
    return np.resize(np.frombuffer(digest, np.uint8), nbytes)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    world = World(seed, tally)
    often = [world.store, world.load, world.hear] * 12
    seldom = [world.replace_weights, world.reset, world.bump, world.restart]
    try:
        for _ in range(world.chance.randrange(20, 200)):
            if stop():
                break
            world.chance.choice(often + seldom)()
        world.settle()
    finally:
        world.close()
        del world, often, seldom  # servers and linkers know each other in circles
        gc.collect()


HUNT = Hunt(
    name="linker",
    promise="SGLang's cache linker brings KV of these weights or none, and answers each offload once",
    run=run,
    effects=("loaded pages", "refused loads", "stored", "updates of weights", "resets", "bumps"),
    enough=30,
)
