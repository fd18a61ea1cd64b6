"""What an engine withdraws is never served with other bytes, and what it published outlives it.

The hunter is an engine itself. Its publishes have deadlines of any length, its node is stopped at any moment, and as
soon as a call has returned the memory that was published from is overwritten, whatever the call said. That may be
memory of an emulated device, whose copies take a while, and come in rounds where the staging is small. A page is one
64-bit number over and over, so that a mixed one is seen. A second engine publishes until it is killed, often while a
member of another host is stopped, so that it dies before that member has been told of what was stored. The node is
killed in the middle of a publish and started anew: keys of before stand for other numbers then.

The nodes and the engine that is killed are ``hunts.attach_processes``, each in a process of its own.
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_buffers import EmulatedBuffer
from fake_cuda import fake_cuda, has_fake_cuda
from hunts.attach_processes import VICTIM_NBYTES, child, device_settings, lines_left, rows_of, victim_keys
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node, SharedRegion
from p2pkv.testing.lateness import Lateness
from patience import PATIENCE

_MOST_PAGES = 32
_LARGEST = 64 * 1024
_POISON = 0xDEAD_0000_0000_0001
"""What is written over published memory; no page is made of it."""
_AGAIN_S = 10.0
"""A node that is back is attached to within a second; starting it takes the rest."""
_TOLD_S = 5.0
"""For a node to tell the owners of entries what an engine could not, and for who asks them to hear it."""
_EVENTS = 3
"""Of a schedule: an engine or the node dies."""


class Hunter:
    """An engine that checks every byte."""

    def __init__(self, folder: str, chance: random.Random, tally: Tally) -> None:
        self.path, self.chance, self.tally = f"unix:{folder}/s", chance, tally
        self.other = child("other")
        self.join = str(self.other.answer(60.0 * PATIENCE))
        self.host = child("host", self.path, self.join)
        self.host.read(60.0 * PATIENCE)
        settings = device_settings(chance.choice(["128KiB", "256KiB", "4MiB"]))
        self.node = Node.start(Config(node_id="hunter", attach=self.path, replicas=1, **settings))
        self.region = SharedRegion.create(_LARGEST * _MOST_PAGES)
        self.node.register_address(self.region.address, self.region.nbytes, self.region)
        self.unshared = np.zeros(_LARGEST * _MOST_PAGES, np.uint8)
        self.node.register_memory(self.unshared)
        self.to = np.zeros(_LARGEST * _MOST_PAGES, np.uint8)
        self.node.register_memory(self.to)
        self.device = EmulatedBuffer(_LARGEST * _MOST_PAGES) if has_fake_cuda() else None
        if self.device is not None:
            self.node.register_memory(self.device.array)
        self.n = 0
        self.n_victims = 0
        self.n_lives = 0

    def publish(self) -> None:
        """Publish, overwrite, and look at what is served."""
        chance = self.chance
        n, nbytes = chance.randint(1, _MOST_PAGES), chance.choice([4096, 16384, _LARGEST])
        where = chance.random()
        memory = self.region.array if where < 0.55 else self.unshared
        device = self.device if where > 0.7 else None
        first = self.n + 1
        self.n += n
        keys = [f"page-{first + i}" for i in range(n)]
        rows = rows_of(memory, n, nbytes)
        rows[:] = np.arange(first, first + n, dtype=np.uint64)[:, None]
        timeout = 10 ** chance.uniform(-4.5, -1.5) if chance.random() < 0.8 else 5.0
        stopping = self._stop_soon() if chance.random() < 0.3 else None
        outcomes = self._publish_in_time(keys, rows, timeout, device)
        rows[:] = _POISON
        if device is not None:
            device.write(rows.view(np.uint8))
            self.tally["from a device"] += int(outcomes.sum())
        if stopping is not None:
            stopping.join()
        self.tally["late"] += int(n - outcomes.sum())
        self.check(keys, range(first, first + n), nbytes)

    def _publish_in_time(
        self,
        keys: list[str],
        rows: NDArray[np.uint64],
        timeout: float,
        device: EmulatedBuffer | None = None,
    ) -> NDArray[np.uint8]:
        pages: Any = rows.view(np.uint8)
        if device is not None:
            fake_cuda().delay_copies(self.chance.choice([0, 200, 2000]))
            device.write(pages)
            pages = device.rows(*pages.shape)
        with Lateness() as late:
            outcomes = self.node.publish(keys, pages, timeout=timeout)
        if late.seconds - late.worst > timeout + 0.1 * PATIENCE:
            raise Broken(f"a publish with {timeout:.4f} s took {late.seconds:.3f} s, {late.worst:.3f} s late")
        return outcomes

    def _stop_soon(self) -> threading.Thread:
        """Stop the node within a publish, for good or for some moments of it."""
        delay, pause = self.chance.uniform(0, 0.002), self.chance.uniform(0, 0.03)

        def stop() -> None:
            time.sleep(delay)  # the random moments are the test
            self.host.stop()
            time.sleep(pause)
            self.host.resume()

        return self._beside(stop, "stops")

    def _beside(self, act: Callable[[], None], what: str) -> threading.Thread:
        thread = threading.Thread(target=act)
        thread.start()
        self.tally[what] += 1
        return thread

    def check(self, keys: list[str], values: range | list[int], nbytes: int) -> int:
        """Fetch pages, of which each must be all of one number; return how many there are."""
        rows = rows_of(self.to, len(keys), nbytes)
        rows[:] = 0
        outcomes = self.node.fetch(keys, rows.view(np.uint8), timeout=5.0)
        for row, value, outcome in zip(rows, values, outcomes, strict=True):
            if outcome and (row != np.uint64(value)).any():
                found = [hex(int(number)) for number in np.unique(row)[:4]]
                raise Broken(f"the page of {value:#x} is served with {found}")
        n_hits = int(outcomes.sum())
        self.tally["hits"] += n_hits
        return n_hits

    def kill_an_engine(self) -> None:
        """Have another engine publish and die: what it was told is published is there, and what was stored is told."""
        self.n_victims += 1
        name = f"victim-{self.n_victims}"
        victim = child(name, self.path, self.chance.choice(["host", "device"]) if self.device else "host")
        victim.read(60.0 * PATIENCE)
        is_cut_off = self.chance.random() < 0.6
        try:
            said = [int(victim.read(30.0 * PATIENCE)) for _ in range(self.chance.randint(1, 12))]
            if is_cut_off:
                self.other.stop()  # from here on the victim waits for it, after its pages were stored
                time.sleep(self.chance.uniform(0, 0.01))
        finally:
            victim.kill()
            victim.close()
            self.other.resume()
        said += lines_left(victim, 30.0 * PATIENCE)
        self.check_published(name, said[-2:])
        self.check_told(name, said[-1] + 1)
        self.tally["killed"] += 1

    def check_published(self, name: str, batches: list[int]) -> None:
        """Have every page of these batches, which were said to be published, be found."""
        for batch in batches:
            keys, values = victim_keys(name, batch)
            until = time.monotonic() + _TOLD_S * PATIENCE
            while (n_hits := self.check(keys, values, VICTIM_NBYTES)) < len(keys):
                if time.monotonic() > until:
                    raise Broken(f"{n_hits} of {len(keys)} pages of an engine that was killed are there")

    def check_told(self, name: str, batch: int) -> None:
        """Have another host find what was stored of a batch, though its engine can't have told it of all of it."""
        keys, values = victim_keys(name, batch)
        attachment = self.node._parts.own_host.attachment
        assert attachment is not None
        stored = attachment.look_up(self.node._cache.hash(keys)[1], 5.0 * PATIENCE)[1].astype(bool)
        wanted = {key: value for key, value, there in zip(keys, values, stored, strict=True) if there}
        self.tally["untold"] += len(wanted)
        until = time.monotonic() + _TOLD_S * PATIENCE
        while wanted:
            self.other.send("fetch", keys=list(wanted))
            found = self.other.answer(30.0 * PATIENCE)
            for key, numbers in found.items():
                if numbers != [value := wanted.pop(key)]:
                    raise Broken(f"the page of {value:#x} is served with {numbers} on another host")
            if wanted and time.monotonic() > until:
                raise Broken(
                    f"{len(wanted)} pages that a node stored for a killed engine are unknown to others"
                )

    def kill_the_node(self) -> None:
        """Have the node die in a publish and come back: it is attached to again, and nothing of before is believed."""
        keys = [f"life-{i}" for i in range(8)]
        self._publish_surely(keys, self._next_life())
        dying = self._beside(self._kill_soon, "deaths")
        rows = rows_of(self.region.array, _MOST_PAGES, _LARGEST)
        rows[:] = np.arange(self.n + 1, self.n + 1 + _MOST_PAGES, dtype=np.uint64)[:, None]
        self._publish_in_time([f"page-{self.n + 1 + i}" for i in range(_MOST_PAGES)], rows, 5.0)
        self.n += _MOST_PAGES
        rows[:] = _POISON
        dying.join()
        self.host.close()
        self._publish_in_time(["nobody"], rows_of(self.region.array, 1, 4096), 0.05)
        self.host = child("host", self.path, self.join)
        self.host.read(60.0 * PATIENCE)
        values = self._next_life()
        if self.check(keys, values, 4096):
            raise Broken("pages are served by a node that nobody has published them to")
        self._publish_surely(keys, values)
        self.check(keys, values, 4096)
        self.tally["returns"] += 1

    def _kill_soon(self) -> None:
        time.sleep(self.chance.uniform(0, 0.005))  # the random moment is the test
        self.host.kill()

    def _next_life(self) -> range:
        """Return what the keys of one life of the node stand for."""
        self.n_lives += 1
        return range(10**9 + self.n_lives * 8, 10**9 + self.n_lives * 8 + 8)

    def _publish_surely(self, keys: list[str], values: range) -> None:
        rows = rows_of(self.region.array, len(keys), 4096)
        rows[:] = np.array(values, np.uint64)[:, None]
        until = time.monotonic() + _AGAIN_S * PATIENCE
        while not self.node.publish(keys, rows.view(np.uint8), timeout=1.0).all():
            if time.monotonic() > until:
                raise Broken(f"nothing can be published {_AGAIN_S:g} s after the node was there")

    def close(self) -> None:
        self.node.close()
        if self.device is not None:
            self.device.close()
            fake_cuda().reset()
        del self.node, self.region
        gc.collect()  # a closed node is in cycles, and keeps what it was shown until they are looked for
        self.host.close(10.0)
        self.other.close(10.0)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="p2pkv-hunt-", ignore_cleanup_errors=True) as folder,
        closing(Hunter(folder, chance, tally)) as hunter,
    ):
        for _ in range(_EVENTS):
            for _ in range(chance.randint(2, 20)):
                hunter.publish()  # before the time is looked at: starting may have taken all of it
                if stop():
                    return
            chance.choice([hunter.kill_an_engine, hunter.kill_the_node])()


HUNT = Hunt(
    "attach",
    "what an engine withdraws is never served with other bytes, and what it published outlives it",
    run,
    effects=("hits", "late", "killed", "untold", "returns", "from a device"),
    only_where={"from a device": has_fake_cuda},
)
