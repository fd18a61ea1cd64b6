"""An engine that publishes without end takes out its own pages, and nobody else's.

The host's node is the hunter's. Two quiet engines have published what they need, less than is left to them, and read
it now and then, or not for long: no page of it is ever missing. Beside them one or two greedy engines, each a process
of its own (``hunts.attach_processes``), publish without end from several threads at once, until they are killed and
started again, while a quiet one is away as well or not. Pages are of two sizes, and the greedy ones publish both by
turns. A page is one 64-bit number over and over, so that a mixed one is seen.
"""

from __future__ import annotations

import gc
import random
import tempfile
from contextlib import ExitStack, closing

import numpy as np

from hunts.attach_processes import GREEDY_PAGES, child, greedy_keys, greedy_size, lines_left, rows_of
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node, SharedRegion
from p2pkv.testing.processes import ChildProcess
from patience import PATIENCE

MIB = 1 << 20
_POOL, _SHARE = 16 * MIB, 0.25
_NEEDED = 3 * MIB
"""Of each quiet engine. With two of these and two shares there are 2 MiB of the pool that nobody ever needs."""
_STEPS = 12
_SURE_S = 60.0 * PATIENCE


class Quiet:
    """An engine that keeps to what it has published."""

    def __init__(self, name: str, path: str, nbytes: int, first: int, chance: random.Random) -> None:
        self._name, self._path, self._nbytes, self._chance = name, path, nbytes, chance
        self._values = list(range(first, first + _NEEDED // nbytes))
        self._start()
        self.publish(range(len(self._values)))

    def _start(self) -> None:
        self._node = Node.start(Config(node_id=self._name, attach=self._path, replicas=1))
        self._region = SharedRegion.create(_NEEDED)
        self._node.register_address(self._region.address, self._region.nbytes, self._region)
        self._to = np.zeros(_NEEDED, np.uint8)
        self._node.register_memory(self._to)

    def publish(self, which: range | list[int]) -> None:
        """Have these pages be published; all of them are there then."""
        rows = rows_of(self._region.array, len(which), self._nbytes)
        rows[:] = np.array([self._values[i] for i in which], np.uint64)[:, None]
        outcomes = self._node.publish(self._keys(which), rows.view(np.uint8), timeout=_SURE_S)
        if not outcomes.all():
            raise Broken(f"{int((outcomes == 0).sum())} of {len(which)} pages of {self._name} are not taken")

    def check(self) -> int:
        """Find all pages, each whole; return how many there are."""
        which = list(range(len(self._values)))
        self._chance.shuffle(which)
        rows = rows_of(self._to, len(which), self._nbytes)
        rows[:] = 0
        outcomes = self._node.fetch(self._keys(which), rows.view(np.uint8), timeout=_SURE_S)
        for row, i, outcome in zip(rows, which, outcomes, strict=True):
            if not outcome:
                raise Broken(f"{int((outcomes == 0).sum())} of {len(which)} pages of {self._name} are gone")
            if (row != np.uint64(self._values[i])).any():
                raise Broken(f"the page of {self._values[i]} is served with {np.unique(row)[:4]}")
        return len(which)

    def publish_again(self) -> None:
        """Publish some of what is there, which takes no room."""
        self.publish(self._chance.sample(range(len(self._values)), min(16, len(self._values))))

    def start_again(self) -> None:
        self._start()

    def _keys(self, which: range | list[int]) -> list[str]:
        return [f"{self._name}-{self._values[i]}" for i in which]

    def close(self) -> None:
        self._node.close()
        del self._node, self._region
        gc.collect()  # a closed node is in cycles, and keeps what it was shown until they are looked for


class Greedy:
    """An engine that publishes without end, life after life."""

    def __init__(self, name: str, path: str, sizes: list[int], node: Node) -> None:
        self._name, self._path, self._sizes, self._node = name, path, sizes, node
        self._n_lives = 0
        self._child = self._start()
        self._to = np.zeros(GREEDY_PAGES * max(sizes), np.uint8)
        node.register_memory(self._to)

    def _start(self) -> ChildProcess:
        self._n_lives += 1
        keys_of = f"{self._name}-{self._n_lives}"
        return child("greedy", self._name, keys_of, self._path, *map(str, self._sizes))

    def publish(self, n: int) -> int:
        """Have it publish some batches; return the number of the last one."""
        last = -1
        for _ in range(n):
            last = int(self._child.read(_SURE_S))
        return last

    def kill(self) -> int:
        """Kill it; return how many pages are still there of those it said last to be published.

        Its other threads may have taken them out since: the share is theirs as well.
        """
        last = self.publish(1)
        self._child.kill()
        self._child.close()
        last = ([last, *lines_left(self._child, _SURE_S)])[-1]
        keys, values = greedy_keys(f"{self._name}-{self._n_lives}", last)
        rows = rows_of(self._to, len(keys), greedy_size(last, self._sizes))
        outcomes = self._node.fetch(keys, rows.view(np.uint8), timeout=_SURE_S).astype(bool)
        if (rows[outcomes] != np.array(values, np.uint64)[outcomes, None]).any():
            raise Broken("a page of an engine that was killed is served with other bytes")
        return int(outcomes.sum())

    def start_again(self) -> None:
        self._child = self._start()
        self.publish(1)

    def close(self) -> None:
        self._child.kill()
        self._child.close()


def _check_room(host: Node, n_greedy: int) -> None:
    """Have the greedy ones be within their shares, with what they have in flight."""
    most = 2 * _NEEDED + n_greedy * int(_SHARE * _POOL)
    if (used := host.counters()["p2pkv_pool_used_bytes"]) > most:
        raise Broken(f"{used} bytes of the pool are used, and {most} are as many as there may be")


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    sizes, n_greedy = chance.sample([4096, 16384, 65536, 131072], 2), chance.choice([1, 1, 2])
    with ExitStack() as undo:
        undo.callback(gc.collect)
        folder = undo.enter_context(
            tempfile.TemporaryDirectory(prefix="p2pkv-hunt-", ignore_cleanup_errors=True)
        )
        path = f"unix:{folder}/s"
        config = Config(
            node_id="host",
            attach_listen=path,
            pool_size=_POOL,
            replicas=1,
            attach_share=_SHARE,
            attach_requests=chance.choice([1, 2, 8]),
        )
        host = undo.enter_context(Node.start(config))
        quiet = [
            undo.enter_context(closing(Quiet(f"quiet-{i}", path, sizes[i], 10**6 * (i + 1), chance)))
            for i in range(2)
        ]
        greedy = [
            undo.enter_context(closing(Greedy(f"greedy-{i}", path, sizes, host))) for i in range(n_greedy)
        ]
        for _ in range(_STEPS):
            if stop():
                break
            chance.choice(greedy).publish(chance.randint(1, 40))
            _check_room(host, n_greedy)
            what = chance.random()
            if what < 0.25:
                one = chance.choice(greedy)
                tally["outlived"] += one.kill()
                one.start_again()
                tally["killed"] += 1
            elif what < 0.4:
                other, one = chance.choice(quiet), chance.choice(greedy)
                if both := chance.random() < 0.5:
                    one.kill()
                    tally["away at once"] += 1
                other.close()
                if both:
                    one.start_again()
                other.start_again()
                tally["restarts"] += 1
            elif what < 0.55:
                chance.choice(quiet).publish_again()
            elif what < 0.9:
                tally["hits"] += quiet[0].check()
        tally["hits"] += sum(one.check() for one in quiet)
        _check_room(host, n_greedy)
        for one in greedy:
            one.close()
        counters = host.counters()
        n_for_shares = int(counters["p2pkv_attach_share_evicted_pages_total"])
        tally["taken out"] += n_for_shares
        n_outgrown = int(counters["p2pkv_attach_share_outgrown_pages_total"])
        tally["outgrown"] += n_outgrown
        if counters["p2pkv_evicted_pages_total"] > n_for_shares:
            raise Broken(
                f"the pool has room for all, and pages went that nobody's share had none for: {n_outgrown}"
            )


HUNT = Hunt(
    "attach_share",
    "an engine that publishes without end takes out its own pages, and nobody else's",
    run,
    effects=("hits", "killed", "outlived", "restarts", "away at once", "taken out"),
)
