"""Transfers between nodes that forget, hurry, withdraw, close their memory and die: rows are right, or not ``OK``.

Some threads, each with rows of its own, offer, put, grant, get and receive. Meanwhile memory is closed at random times
and given to somebody else at once, or a node ends. Host memory, shared memory and that of an emulated device take part.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from fake_cuda import fake_cuda, has_fake_cuda
from hunts.areas import ROW, Area
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.timing import check_time
from p2pkv import Config, Node, _native
from p2pkv.directory.view import State, View
from p2pkv.errors import ClosedError, NotRegisteredError
from p2pkv.offers.handles import Grant, Offer, RowSpans, RowStatuses
from p2pkv.testing.lateness import Lateness
from p2pkv.transfers import RowStatus

T = TypeVar("T")

GRACE = 0.1
N_ACTORS, N_STEPS, ROWS = 3, 8, 8
_LONG_LEASE, _FAR_S = 30.0, 10.0
"""Of offers, and to the deadline of a get that is refused; no machine stands still for so long."""
_SECONDS = [0.002, 0.02, 0.1, 0.5]
_DEATH_GRACE_S = 0.3
_AT_ONCE_S = 0.25
"""For an answer over a link, which takes a tenth of a millisecond. Memory is closed every second or so, and ends a get
that waits: it must show before."""
_KINDS = ("host", "shared", "device")


class World:
    """Three nodes, their memory, and the threads that use it."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.lock = threading.Lock()  # guards tally and broken
        self.broken: list[Broken] = []
        self.is_over = False
        self.has_ended = False
        self.links: dict[str, int] = {}
        """How many each node had when it misjudged another, by node id."""
        self.copy_s = self.rng.choice([0.0, 0.0, 0.002, 0.07]) if has_fake_cuda() else 0.0
        choices = [["tcp"], ["shm"], ["shm", "tcp"]]
        if has_fake_cuda():
            _native.cuda_use_library(fake_cuda().path)  # before it is looked whether cuda_ipc can run
            choices += [["cuda_ipc"], ["cuda_ipc", "tcp"]]
        transports = self.rng.choice(choices)
        kinds = [
            k for k in _KINDS if (k != "device" or has_fake_cuda()) and (k != "host" or "tcp" in transports)
        ]
        settings = {
            "transports": transports,
            "pool_size": self.rng.choice([0, "1MiB"]),
            "deadline": 1.0,
            "buffer_size": self.rng.choice([0, ROW * ROWS * 2, "4MiB"]),
            "buddy_pool_size": self.rng.choice([0, 0, "1MiB"]),
            "device_staging_size": self.rng.choice(["256KiB", "4MiB"]),
            "transfer_lease": self.rng.choice([0.15, _LONG_LEASE]),
            **({"cuda_library": fake_cuda().path} if has_fake_cuda() else {}),
        }
        self.remembers = settings["transfer_lease"] == _LONG_LEASE
        self.nodes: list[Node] = []
        for i in range(3):
            join = self.nodes[0].address if self.nodes else ()
            self.nodes.append(Node.start(Config(node_id=f"{seed}-{i}", join=join, **settings)))
        until = time.monotonic() + 30.0
        while any(len(node.members()) < 3 for node in self.nodes) and time.monotonic() < until:
            time.sleep(0.002)  # looked at again
        self.areas = [
            [Area(node, self.rng.choice(kinds), N_ACTORS * ROWS) for _ in range(2)] for node in self.nodes
        ]
        if has_fake_cuda():
            fake_cuda().delay_copies(int(self.copy_s * 1e6))

    def count(self, what: str, n: int = 1) -> None:
        with self.lock:
            self.tally[what] += n

    def timed(self, what: str, seconds: float, call: Callable[[], T]) -> T:
        """Demand that a call ends in time; a copy that a device has begun can't be called back, and others wait."""
        with Lateness() as late:
            try:
                return call()
            finally:
                check_time(what, seconds + GRACE + 6 * self.copy_s, late)
                self.count("calls in time")

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._act, args=(actor, self.rng.getrandbits(60)))
            for actor in range(N_ACTORS)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(self.rng.choice([0.001, 0.01, 0.05]))
                self._disturb()
        finally:
            self.is_over = True
            for thread in threads:
                thread.join()

    def _act(self, actor: int, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for step in range(N_STEPS):
                if self.is_over or self.broken:
                    return
                Step(self, rng, actor, f"{actor}/{step}/{seed}").run()
        except Broken as broken:
            with self.lock:
                self.broken.append(broken)
        except Exception as error:  # noqa: BLE001 - the top of a thread: whatever it is, no promise allows it
            with self.lock:
                self.broken.append(Broken(f"actor {actor}: {error!r}"))

    def _disturb(self) -> None:
        area = self.rng.choice(self.rng.choice(self.areas))
        chance = self.rng.random()
        if chance < 0.25 and area.is_open:
            bar = self.rng.random() < 0.5
            self.timed("closing", 0.0, lambda: area.close(bar=bar))
            self.count("memories closed")
        elif chance < 0.35 and area.is_open:
            area.check()
        elif chance < 0.75 and not area.is_open:
            try:
                area.open()
            except ClosedError:
                return
        elif chance < 0.9:
            self._misjudge()
        elif chance > 0.99:
            self.has_ended = True
            self.rng.choice(self.nodes).close()
            self.count("nodes ended")

    def _misjudge(self) -> None:
        """Have a node take another for dead, and take that back: no request may notice."""
        judge, other = self.rng.sample(self.nodes, 2)
        try:
            alive = View(judge.members())
            dead = alive.replacing([replace(alive[other.node_id], state=State.DEAD)])
            self.links[judge.node_id] = max(self._n_links(judge), self.links.get(judge.node_id, 0))
        except (ClosedError, KeyError):  # KeyError: it has left
            return
        began = time.monotonic()
        judge.transfers.set_view(alive, dead, grace=_DEATH_GRACE_S)
        spin(self.rng.choice([0.0, 0.001, 0.05]))
        judge.transfers.set_view(dead, alive)
        if time.monotonic() - began >= _DEATH_GRACE_S:  # the machine stood still, and links may be gone
            self.links[judge.node_id] = 0
        self.count("verdicts taken back")

    @staticmethod
    def _n_links(node: Node) -> int:
        return int(node.counters()["p2pkv_transfer_links"])

    def check_links(self) -> None:
        """Demand that nobody has hung up because of a verdict that was taken back."""
        if self.has_ended:
            return
        for node in self.nodes:
            had, has = self.links.get(node.node_id, 0), self._n_links(node)
            if has < had:
                raise Broken(
                    f"{node.node_id} had {had} links before a verdict that was taken back, and has {has}"
                )

    def close(self) -> None:
        """End all, and look at every row once more: nobody may have written to what was returned."""
        try:
            for node in self.nodes:
                node.close()
            for area in (area for areas in self.areas for area in areas):
                area.unbar()
                area.check()
                self.count("memories untouched")
        finally:
            if has_fake_cuda():
                fake_cuda().delay_copies(0)
            for area in (area for areas in self.areas for area in areas):
                area.unbar()
                area.free()


class Step:
    """One request of one thread: some rows from one node to another, in one of the ways there are."""

    def __init__(self, world: World, rng: random.Random, actor: int, name: str) -> None:
        self.world = world
        self.rng = rng
        self.name = name
        source, target = rng.sample(range(3), 2)
        self.producer, self.receiver = world.nodes[source], world.nodes[target]
        self.source, self.target = rng.choice(world.areas[source]), rng.choice(world.areas[target])
        self.rows = range(actor * ROWS, actor * ROWS + rng.randint(1, ROWS))
        self.values = [rng.getrandbits(62) | 1 for _ in self.rows]
        self.life = self.source.life
        self.offer: Offer | None = None
        self.is_filled = False
        self.has_values = False  # the offered rows had these values when they were offered

    def run(self) -> None:
        way = self.rng.choice([self._granted, self._stored, self._got, self._withdrawn, self._revoked])
        filled = [self.source.fill(row, value) for row, value in zip(self.rows, self.values, strict=True)]
        self.is_filled = all(filled)
        try:
            way()
        except (NotRegisteredError, ClosedError):
            self.world.count("refused")  # the memory, or the node, went before the call
        finally:
            if self.offer is not None:
                self._withdraw()
        for row in self.rows:
            self.source.fill(row, self.rng.getrandbits(62) | 1)
            self.target.fill(row, self.rng.getrandbits(62) | 1)

    def _granted(self) -> None:
        seconds = self.rng.choice(_SECONDS)
        grant = self._grant(seconds)
        try:
            self._put()
            self._timed("wait", seconds, lambda: grant.wait(seconds))
        finally:
            got = self._revoke(grant)
        if (got == RowStatus.PEER_LOST).any() and not self.world.has_ended:
            raise Broken(f"rows of {self.name} were lost with a node that is there: {got}")
        self._judge(got, self._withdraw())

    def _stored(self) -> None:
        self._put()
        self._timed("wait", 0.3, lambda: self._made.wait(self.rng.choice([0.0, 0.02, 0.3])))
        had = np.zeros(len(self.rows), bool)
        for _ in range(self.rng.randint(1, 3)):
            seconds = self.rng.choice(_SECONDS)
            self._lend()
            got = self._timed(
                "receive",
                seconds,
                lambda s=seconds: self.receiver.transfers.receive(self.name, self._target_spans(), timeout=s),
            )
            self._judge(got)
            if (had & (got == RowStatus.OK)).any():
                raise Broken(f"a row of {self.name} came twice: {got}")
            had |= got == RowStatus.OK
            self._take_back()
        self._compare(np.where(had, RowStatus.OK, RowStatus.PENDING), self._withdraw())

    def _got(self) -> None:
        seconds = self.rng.choice(_SECONDS)
        spans = self.source.spans(self.rows.start, len(self.rows))
        self.offer = self.producer.transfers.offer(self.name, spans, lease=self.rng.choice([0.01, 1.0]))
        self.has_values = self.is_filled and self.source.life == self.life
        self._lend()
        got = self._timed(
            "get",
            seconds,
            lambda: self.receiver.transfers.get(
                self.producer.node_id, self.name, self._target_spans(), timeout=seconds
            ),
        )
        self._judge(got, self._withdraw())
        if self.world.remembers:
            self._got_in_vain()

    def _got_in_vain(self) -> None:
        """Ask for what is over, with a deadline that is far away: nobody may wait for that."""
        with Lateness() as late:
            got = self.receiver.transfers.get(
                self.producer.node_id, self.name, self._target_spans(), timeout=_FAR_S
            )
        if (got == RowStatus.OK).any() or (got == RowStatus.TIMED_OUT).any():
            raise Broken(f"the offer of {self.name} is over, and a get of it has {got}")
        if not (got == RowStatus.PEER_LOST).any():  # to find that a node has ended may take longer
            check_time("get of what is over", _AT_ONCE_S, late)
        self.world.count("gets refused", int((got == RowStatus.GONE).all()))

    def _withdrawn(self) -> None:
        grant = self._grant(0.5)
        try:
            self._put()
            spin(self.rng.random() * 0.003)
            put = self._withdraw()
            for row in self.rows:
                self.source.fill(row, 3)  # at once: a pull under way may see it, and must not count
            grant.wait(0.02)
        finally:
            got = self._revoke(grant)
        self._judge(got, put)

    def _revoked(self) -> None:
        grant = self._grant(0.5)
        try:
            self._put()
            spin(self.rng.random() * 0.003)
        finally:
            got = self._revoke(grant)
            self._judge(got)
            self._take_back()
        spin(self.rng.random() * 0.003)
        self._compare(got, self._withdraw())
        self.target.check()

    def _grant(self, seconds: float) -> Grant:
        self._lend()
        spans = self._target_spans()
        return self._timed(
            "grant", seconds, lambda: self.receiver.transfers.grant(self.name, spans, timeout=seconds)
        )

    def _put(self) -> None:
        spans = self.source.spans(self.rows.start, len(self.rows))
        lease = self.rng.choice([0.01, 0.5, 2.0])
        put = self.producer.transfers.put_async
        self.offer = self._timed(
            "put_async", 1.0, lambda: put(self.receiver.node_id, self.name, spans, lease=lease)
        )
        self.has_values = self.is_filled and self.source.life == self.life

    @property
    def _made(self) -> Offer:
        assert self.offer is not None
        return self.offer

    def _withdraw(self) -> RowStatuses:
        return self._timed("withdraw", 0.0, self._made.withdraw)

    def _revoke(self, grant: Grant) -> RowStatuses:
        return self._timed("revoke", 0.0, grant.revoke)

    def _timed(self, what: str, seconds: float, call: Callable[[], T]) -> T:
        return self.world.timed(f"{what} of request {self.name}", seconds, call)

    def _target_spans(self) -> RowSpans:
        return self.target.spans(self.rows.start, len(self.rows))

    def _lend(self) -> None:
        self.target_life = self.target.life
        for row in self.rows:
            self.target.lend(row)

    def _take_back(self) -> None:
        for row in self.rows:
            self.target.fill(row, 5)

    def _judge(self, got: RowStatuses, put: RowStatuses | None = None) -> None:
        """Demand that what is ``OK`` is what was offered, and that the producer knows."""
        if put is not None:
            self._compare(got, put)
        self.world.count("rows not OK", int((got != RowStatus.OK).sum()))
        for i in np.flatnonzero(got == RowStatus.OK):
            self.world.count("rows right")
            if self.has_values and not self.target.holds(self.rows[i], self.values[i], self.target_life):
                raise Broken(
                    f"row {i} of {self.name} is OK and wrong, {self.source.kind} to {self.target.kind}"
                )

    def _compare(self, got: RowStatuses, put: RowStatuses) -> None:
        if ((got == RowStatus.OK) & (put != RowStatus.OK)).any():
            raise Broken(f"{self.name}: the receiver has {got}, and the producer says {put}")


def spin(seconds: float) -> None:
    """Let some time pass, so that what follows falls into the middle of something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def run(seed: int, tally: Tally, stop: Stop) -> None:
    broken = _run(seed, tally)
    gc.collect()  # nodes are in cycles, and keep their descriptors until those are found
    if broken:
        raise broken[0]


def _run(seed: int, tally: Tally) -> list[Broken]:
    world = World(seed, tally)
    try:
        world.run()
        world.check_links()
    finally:
        world.close()
    return world.broken


HUNT = Hunt(
    "transfers",
    "a transfer is what was offered, or not OK; what was returned or closed is not touched",
    run,
    effects=(
        "rows right",
        "rows not OK",
        "refused",
        "gets refused",
        "memories closed",
        "nodes ended",
        "verdicts taken back",
    ),
)
