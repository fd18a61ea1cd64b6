"""Measure what the directory of a thousand hosts holds and costs, and what a join or a loss has them all do.

Measured with the nodes of :mod:`.fabric_nodes`; after each change the shards are asked for all entries there should be.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from p2pkv.control.wire import Kind
from p2pkv.directory.announcer import CHECK_S
from p2pkv.directory.ring import NOBODY, SEATS, Ring
from p2pkv.directory.view import Member, encode
from p2pkv.page import KEY_BYTES
from p2pkv_bench.errors import BenchError
from p2pkv_bench.fabric_nodes import NEVER_S, REPLICAS, Fabric, FabricNode, Traffic, lacking
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, Target, make_row

_SEED = 1
_BOOT = 1_700_000_000_000_000_000
"""Simulated clocks say that this is the time when they begin."""
_TRANSPORTS = {"shm": "01234567-89ab-cdef-0123-456789abcdef", "tcp": "net"}
_LOOK_UP = 128
_MOST_ASKED = 4
"""Members that are asked for pages of one node: those who own the first page's entry, and who has it."""
_SHARERS = 3
"""So many nodes have the same pages, of those that several have."""
_LOOK_UPS = 300
_CHECKERS = 8
"""Nodes that check their entries: what each of the others would ask for is as much."""
_LOSSES = 10
_SWEPT_S = 30.0
"""By then shards have dropped what is not theirs any more, and what is of owners that have gone."""

Figure = tuple[str, str, Sequence[float], Target | None]


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Have as many members as the plan says, each size by itself."""
    for n in plan.members:
        measured = Measured(n, plan)
        try:
            for case, unit, values, target in measured.figures():
                row = {"p2pkv": list(values)}
                yield make_row(row, suite="fabric", case=f"{n} members: {case}", unit=unit, target=target)
        finally:
            measured.close()


class Measured:
    """One fabric, from its making to its last loss."""

    def __init__(self, n_members: int, plan: Plan) -> None:
        self._plan = plan
        self._n = n_members
        self._n_pages = plan.published // n_members
        self._random = np.random.default_rng(_SEED)
        self._fabric = Fabric(_SEED)
        self._n_named = 0
        self._n_look_ups = min(_LOOK_UPS, 2 * n_members)

    def figures(self) -> Iterator[Figure]:
        """Measure all there is."""
        yield from self._filled()
        yield from self._looked_up("with all there")
        yield from self._idle()
        has_unseated = self._n > SEATS
        if has_unseated:
            yield from self._joined("a join without a seat", seated=False)
            yield from self._lost("a loss without a seat", self._chosen(1, seated=False))
        yield from self._joined("a join that takes a seat", seated=True)
        yield from self._lost("the loss of a seat", self._chosen(1, seated=True))
        if has_unseated:
            yield from self._lost(f"{_LOSSES} losses at once, of any", self._chosen(_LOSSES, seated=None))
        if self._n > 2 * _LOSSES:
            yield from self._lost(f"{_LOSSES} losses at once, of seats", self._chosen(_LOSSES, seated=True))
        yield from self._shared()

    def close(self) -> None:
        """Release all."""
        gc.unfreeze()
        self._fabric.close()

    # what is there

    def _filled(self) -> Iterator[Figure]:
        fabric = self._fabric
        self._tell("are made")
        for i in range(self._n):
            check_s = CHECK_S if i < _CHECKERS else NEVER_S
            node = fabric.add(self._next_member(), self._n_pages, check_s=check_s)
            node.publish(self._random.integers(0, 256, (self._n_pages, KEY_BYTES), np.uint8))
        gc.collect()
        gc.freeze()  # what a thousand nodes consist of would be looked through again and again, and be timed with them
        fabric.tell()
        view = [node.member for node in fabric.nodes.values()]
        yield "a view, encoded", "kB", [len(encode(view[0].node_id, view)) / 1e3], None
        self._tell("put their entries")
        before = _resident_nbytes()
        traffic = fabric.count_anew()
        fabric.settle()  # nobody has told anybody of a page yet: all is put
        took = _resident_nbytes() - before
        seats = self._seats()
        stats = [node.shard.stats() for node in seats]
        entries = np.array([each["entries"] for each in stats])
        yield "entries of a seat", "", entries.tolist(), None
        yield "entries of the fullest, of the mean", "x", [entries.max() / entries.mean()], None
        yield "a seat's table", "MB", [each["nbytes"] / 1e6 for each in stats], None
        yield "a table, an entry", "bytes", [each["nbytes"] / each["entries"] for each in stats], None
        yield "resident memory a seat", "MB", [took / len(seats) / 1e6], None
        yield "the same, an entry", "bytes", [took / entries.sum()], None
        yield from self._costs("all put anew", traffic)
        yield from self._checked("all put anew")

    def _looked_up(self, when: str) -> Iterator[Figure]:
        self._tell(f"look up pages {when}")
        traffic = self._fabric.count_anew()
        self._share_found()
        yield from self._asked(f"pages of one node {when}", traffic, Target(_MOST_ASKED, at_most=True))

    def _shared(self) -> Iterator[Figure]:
        """Have newcomers publish the same pages, and look these up."""
        keys = self._random.integers(0, 256, (_LOOK_UP, KEY_BYTES), np.uint8)
        for _ in range(_SHARERS):
            self._fabric.add(self._next_member(), _LOOK_UP).publish(keys)
        self._fabric.tell()
        self._fabric.settle()
        nodes = list(self._fabric.nodes.values())[:-_SHARERS]
        traffic = self._fabric.count_anew()
        for _ in range(self._n_look_ups):
            n_found, _ = nodes[self._random.integers(len(nodes))].look_up(keys)
            if n_found != len(keys):
                raise BenchError(f"{n_found} of {len(keys)} pages that several have were found")
        most = Target(_MOST_ASKED - 1 + _SHARERS, at_most=True)
        yield from self._asked(f"pages that {_SHARERS} nodes have", traffic, most)

    def _asked(self, of_what: str, traffic: Traffic, most: Target) -> Iterator[Figure]:
        n = self._n_look_ups
        what = f"a look-up of {_LOOK_UP} {of_what}"
        asked, nbytes, served_ns = (
            sum(of[kind] for kind in (Kind.LOCATE, Kind.HELD)) / n
            for of in (traffic.requests, traffic.nbytes, traffic.served_ns)
        )
        yield f"{what}: members asked", "", [asked], most
        yield f"{what}: requests and answers", "kB", [nbytes / 1e3], None
        yield f"{what}: shards' processor time", "us", [served_ns / 1e3], None
        yield f"{what}: asker's processor time", "us", [traffic.asking_ns / n / 1e3], None

    def _share_found(self) -> float:
        """Look up pages of nodes that live, each time by another; return how many percent were found."""
        nodes = list(self._fabric.nodes.values())
        n_found = n_asked = 0
        for _ in range(self._n_look_ups):
            reader, owner = (nodes[i] for i in self._random.choice(len(nodes), 2, replace=False))
            asked = next(owner.pages(_LOOK_UP))
            found, locations = reader.look_up(asked)
            if (locations["owner"] != owner.member.key).any():
                raise BenchError("a page was found with who does not have it")
            n_found, n_asked = n_found + found, n_asked + len(asked)
        return 100 * n_found / max(1, n_asked)

    def _idle(self) -> Iterator[Figure]:
        """Have some nodes check their entries for as long as it takes to check all, and say what all cost a seat."""
        self._tell("check their entries")
        checkers = list(self._fabric.nodes.values())[:_CHECKERS]
        self._fabric.idle(CHECK_S, checkers)  # each begins at a moment of its own
        traffic = self._fabric.count_anew()
        self._fabric.idle(CHECK_S, checkers)
        times = self._n / len(checkers) / CHECK_S / len(self._seats())
        kind = Kind.CHECK
        yield "idle: entries that a seat is asked for", "/s", [traffic.records[kind] * times], None
        yield "idle: requests that a seat answers", "/s", [traffic.requests[kind] * times], None
        yield "idle: bytes of them", "kB/s", [traffic.nbytes[kind] * times / 1e3], None
        yield "idle: processor time of a seat", "%", [traffic.served_ns[kind] * times / 1e7], None

    # what comes and goes

    def _joined(self, what: str, *, seated: bool) -> Iterator[Figure]:
        member = self._next_member()
        members = [node.member for node in self._fabric.nodes.values()]
        while (member.node_id in _seated_ids(Ring([*members, member], REPLICAS))) is not seated:
            member = self._next_member()
        self._fabric.add(member)
        yield from self._changed(what)

    def _lost(self, what: str, node_ids: list[str]) -> Iterator[Figure]:
        self._fabric.lose(node_ids)
        self._tell(f"look up pages after {what}")
        found = self._share_found()
        yield f"{what}: found while nobody knows of it", "%", [found], None
        yield from self._changed(what)

    def _changed(self, what: str) -> Iterator[Figure]:
        fabric = self._fabric
        self._tell(f"hear of {what}")
        fabric.tell()
        n_lacking = lacking(fabric)
        found = self._share_found()
        yield f"{what}: found before anything is put again", "%", [found], None
        yield f"{what}: entries lacking", "", [float(n_lacking)], None
        yield f"{what}: the same, of all", "%", [100 * n_lacking / self._n_entries()], None
        view_ms = [node.view_ns / 1e6 for node in fabric.nodes.values()]
        yield f"{what}: a node's processor time for the view", "ms", view_ms, None
        self._tell(f"put entries again after {what}")
        traffic = fabric.count_anew()
        fabric.settle()
        yield from self._costs(what, traffic)
        n_put = float(traffic.records[Kind.PUT])
        if n_lacking:
            yield f"{what}: entries put for one that lacked", "x", [n_put / n_lacking], None
        yield from self._checked(what)

    def _costs(self, what: str, traffic: Traffic) -> Iterator[Figure]:
        """Say what has been put since ``traffic`` was begun, and what that took."""
        n_put, n_requests = traffic.records[Kind.PUT], traffic.requests[Kind.PUT]
        step_ms = [node.step_ns / 1e6 for node in self._fabric.nodes.values()]
        yield f"{what}: entries put", "", [n_put], None
        yield f"{what}: a node's processor time to put", "ms", step_ms, None
        if n_requests:
            served_ms = traffic.served_ns[Kind.PUT] / 1e6
            yield f"{what}: requests", "", [n_requests], None
            yield f"{what}: entries a request", "", [n_put / n_requests], None
            yield f"{what}: requests and answers", "MB", [traffic.nbytes[Kind.PUT] / 1e6], None
            yield f"{what}: requests at the busiest seat", "", [max(traffic.puts_at.values())], None
            yield f"{what}: a seat's processor time", "ms", [served_ms / len(self._seats())], None

    def _checked(self, what: str) -> Iterator[Figure]:
        """Ask all shards for all entries, and look pages up; whoever is not there any more has none left at the end."""
        fabric = self._fabric
        self._tell(f"are asked for all entries after {what}")
        yield f"{what}: entries lacking afterwards", "", [lacking(fabric)], Target(0, at_most=True)
        yield f"{what}: found afterwards", "%", [self._share_found()], Target(100)
        fabric.sweep(_SWEPT_S)
        n_there = sum(node.shard.stats()["entries"] for node in fabric.nodes.values())
        n_stray = n_there - self._n_entries()
        yield f"{what}: entries too many, {_SWEPT_S:g} s later", "", [n_stray], Target(0, at_most=True)

    def _n_entries(self) -> int:
        """Return how many entries there should be."""
        n_pages = sum(node.pool.stats()["pages"] for node in self._fabric.nodes.values())
        return min(REPLICAS, len(self._fabric.nodes)) * n_pages

    def _seats(self) -> list[FabricNode]:
        return [self._fabric.nodes[node_id] for node_id in sorted(_seated_ids(self._fabric.ring()))]

    def _chosen(self, n: int, *, seated: bool | None) -> list[str]:
        """Draw members with seats, or without, or of all."""
        seats = _seated_ids(self._fabric.ring())
        among = [node_id for node_id in self._fabric.nodes if seated is None or (node_id in seats) is seated]
        return [str(node_id) for node_id in self._random.choice(among, n, replace=False)]

    def _next_member(self) -> Member:
        self._n_named += 1
        name = f"node-{self._n_named}.example"
        boot = _BOOT + int(self._fabric.now * 1e9) + self._n_named
        return Member(name, boot, f"{name}:7400", transports=_TRANSPORTS)

    def _tell(self, what: str) -> None:
        self._plan.tell(f"{self._n} members {what}")


def _seated_ids(ring: Ring) -> set[str]:
    return {ring.members[index].node_id for index in np.unique(ring.successors) if index != NOBODY}


def _resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
