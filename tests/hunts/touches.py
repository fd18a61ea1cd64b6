"""A page that others read every so often stays in its owner's pool, and one that nobody uses makes room.

An owner with a small pool publishes ever more pages, takes some back, clears, and is started again, while one to three
readers read some of its pages, a few or more than they note, over tcp or shm. A model says what an owner that sees
each read would keep: its oracle is asked once all that was read has been told.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

import pages
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node
from p2pkv.cache.page_cache import PageCache
from patience import PATIENCE

PAGE = 16 * 1024
N_ROOM = 256
"""Pages that the owner's pool has room for."""
MOST = 24
"""Pages of a publish or a read."""
N_FAVOURITES = N_ROOM // 4
MARGIN = N_FAVOURITES + MOST
"""Pages whose order the model does not know: what several readers read is told when each of them tells."""
NOTED = 4096
"""Reads that a reader keeps between two rounds (``native/src/cache/touches.h``)."""
WAIT_S = 20.0 * PATIENCE
TOLD, HEARD = "p2pkv_told_touches_total", "p2pkv_heard_touches_total"


class World:
    """One schedule: an owner, its readers, and the model of the owner's pool."""

    def __init__(self, chance: random.Random, tally: Tally) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.memory = np.zeros((MOST, PAGE), np.uint8)
        self.transport = chance.choice(["tcp", "shm"])
        self.n_keys = self.n_published = 0
        self.uses: dict[
            str, int
        ] = {}  # in the order of their last uses; and how many were published before each
        self.favourites: list[str] = []
        self.readers: list[Node] = []
        for i in range(chance.randint(1, 3)):
            self.readers.append(self.start(f"reader{i}", MOST * PAGE))
        self.owner = self.start("owner", N_ROOM * PAGE)
        self.told_before = 0.0  # to other lives of the owner
        self.meet()

    def start(self, node_id: str, pool_size: int) -> Node:
        config = Config(
            node_id=node_id,
            pool_size=pool_size,
            buffer_size=0,
            transports=(self.transport,),
            join=[self.readers[0].address] if self.readers else [],
            deadline=10.0,
        )
        node = Node.start(config)
        node.register_memory(self.memory)
        return node

    def close(self) -> None:
        for node in (self.owner, *self.readers):
            node.close()

    def broken(self, what: str) -> Broken:
        said = f"told {self.told()} after {self.told_before}, heard {self.owner.counters()[HEARD]}"
        return Broken("\n".join([what, said, *self.story[-40:]]))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise self.broken(f"not within {WAIT_S:g} s: {what}")
            time.sleep(0.002)  # looked at again; nobody says so

    def meet(self) -> None:
        """Wait until the owner hears of whatever is read: at first there are no channels."""
        boot = next(member.boot_epoch for member in self.owner.members() if member.node_id == "owner")
        known = ("owner", boot)
        for reader in self.readers:
            self.wait(
                "all know the owner",
                lambda reader=reader: known in {(m.node_id, m.boot_epoch) for m in reader.members()},  # type: ignore[misc]
            )
            probe = self.publish(1)[0]

            def is_heard(reader: Node = reader, probe: str = probe) -> bool:
                heard = self.owner.counters()[HEARD]
                reader.fetch([probe], self.memory[:1])
                time.sleep(0.01)  # asked again; the round that tells of it comes when it comes
                return self.owner.counters()[HEARD] > heard

            self.wait("the owner hears of reads", is_heard)

    def told(self) -> float:
        return sum(reader.counters()[TOLD] for reader in self.readers)

    # --- what happens

    def publish(self, n: int) -> list[str]:
        keys = [f"k{self.n_keys + i}" for i in range(n)]
        self.n_keys += n
        pages.fill(self.memory[:n], keys)
        if not self.owner.publish(keys, self.memory[:n]).all():
            raise self.broken(f"not published: {keys}")
        self.used(keys)
        self.n_published += n
        for key in keys:
            self.uses[key] = self.n_published
        return keys

    def used(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            self.uses[key] = self.uses.pop(key, self.n_published)

    def read(self, reader: Node, keys: Sequence[str]) -> None:
        """Read what the model has, which must be there."""
        for first in range(0, len(keys), MOST):
            batch = list(keys[first : first + MOST])
            memory = self.memory[: len(batch)]
            hits = reader.fetch(batch, memory)
            if wrong := pages.wrong(memory, batch, hits):
                raise self.broken(f"wrong bytes of {wrong}")
            if not hits.all():
                missed = [key for key, hit in zip(batch, hits, strict=True) if not hit]
                raise self.broken(f"{missed} were there and are missed")
            self.tally["read"] += len(batch)

    def settle(self) -> None:
        """Return once the owner has heard of all that was read so far.

        A round that tells of a page which was read after others tells of these too. That what was told has grown may
        be owed to the round before, and to what that one could not tell: so there are three of them.
        """
        for _ in range(3):
            told = [reader.counters()[TOLD] for reader in self.readers]
            for reader in self.readers:
                self.read(reader, self.probe())
            for reader, before in zip(self.readers, told, strict=True):
                self.wait(
                    "reads are told",
                    lambda reader=reader, before=before: reader.counters()[TOLD] > before,  # type: ignore[misc]
                )

    def probe(self) -> list[str]:
        newest = list(self.uses)[-1:] or self.publish(1)
        self.used(newest)
        return newest

    def read_some(self) -> None:
        """Read favourites and others, each reader some of them."""
        self.favourites = [key for key in self.favourites if key in self.uses]
        there = [key for key in self.uses if key not in self.favourites]
        while len(self.favourites) < N_FAVOURITES and there:
            self.favourites.append(there.pop(self.chance.randrange(len(there))))
        keys = self.chance.sample(self.favourites, self.chance.randint(1, len(self.favourites)))
        self.story.append(f"{len(keys)} pages are read")
        for i, reader in enumerate(self.readers):
            self.read(reader, keys[i :: len(self.readers)])
        self.used(keys)

    def read_many(self) -> None:
        """Read more within a round than is noted: at first some pages only, then others as often."""
        if len(self.uses) < 2 * MOST:
            return
        chosen = self.chance.sample(list(self.uses), 2 * MOST)
        self.story.append(f"{len(chosen)} pages are read again and again")
        for keys in (chosen[:MOST], chosen[MOST:]):
            for _ in range(-(-NOTED // MOST)):
                self.read(self.readers[0], keys)
        self.used(chosen)
        self.tally["more than is noted"] += 1

    def publish_some(self) -> None:
        n = self.chance.randint(1, N_ROOM // 2)
        self.story.append(f"{n} pages are published")
        for first in range(0, n, MOST):
            self.publish(min(MOST, n - first))

    def take_back(self) -> None:
        chosen = self.chance.sample(list(self.uses), min(len(self.uses), self.chance.randint(1, MOST)))
        if not chosen:
            return
        self.story.append(f"{len(chosen)} pages are taken back")
        self.owner.retract(chosen)
        for key in chosen:
            del self.uses[key]

    def clear(self) -> None:
        self.story.append("the owner clears")
        self.owner.clear()
        self.uses.clear()

    def restart(self) -> None:
        self.story.append("the owner starts again")
        self.owner.close()
        self.uses.clear()
        self.told_before = self.told()
        self.owner = self.start("owner", N_ROOM * PAGE)
        self.meet()

    # --- the oracle

    def judge(self) -> None:
        """What was used lately is there, and what was not is gone."""
        self.settle()
        told = self.told() - self.told_before
        self.wait("what was told is heard", lambda: self.owner.counters()[HEARD] >= told)
        keys = list(self.uses)
        if not keys:
            return
        cache = self.owner._cache
        caching = self.owner._parts.caching
        assert isinstance(cache, PageCache)
        found, _ = caching.pool.lookup(cache.hash(keys)[1])  # type: ignore[union-attr]
        for n_later, (key, is_there) in enumerate(zip(reversed(keys), reversed(found), strict=True)):
            if not is_there and n_later < N_ROOM - MARGIN:
                raise self.broken(f"{key} has gone, though only {n_later} others were used since")
            if is_there and n_later >= N_ROOM + MARGIN:
                raise self.broken(f"{key} is there, though {n_later} others were used since")
            if is_there and self.n_published - self.uses[key] >= N_ROOM + MARGIN:
                self.tally["kept by reads"] += 1
            if not is_there:
                self.tally["made room"] += 1
                del self.uses[key]
        self.tally["judged"] += 1


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    world = World(chance, tally)
    steps: list[tuple[Callable[[], None], float]] = [
        (world.read_some, 8),
        (world.publish_some, 8),
        (world.take_back, 1),
        (world.read_many, 0.5),
        (world.clear, 0.3),
        (world.restart, 0.3),
    ]
    what, weights = zip(*steps, strict=True)
    try:
        world.publish_some()
        for _ in range(chance.randint(10, 30)):
            if stop():
                break
            step = chance.choices(what, weights)[0]
            if step == world.read_some and not world.uses:
                step = world.publish_some
            step()
            world.judge()
    finally:
        world.close()
        del world, steps, what
        gc.collect()  # what a node has open goes with the object


HUNT = Hunt(
    "touches",
    "A page that others read every so often stays in its owner's pool; what nobody uses makes room for it",
    run,
    effects=("kept by reads", "made room", "judged", "more than is noted"),
    enough=8,
)
