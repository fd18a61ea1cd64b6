"""An engine that is attached to its host's node, beside a node that has its pool itself, in the same rounds.

The host's node is another process; what it is compared with is in this one. All are members of one cluster, but the
engine. Where pages are published, and read from the own host, the entry of every key lies at the node that stores its
page, so that neither side waits for anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from p2pkv.node import Node
from p2pkv_bench import attached_engines
from p2pkv_bench.attached_engines import HOST, path_of
from p2pkv_bench.errors import BenchError
from p2pkv_bench.fetch import fetch_all, read_once
from p2pkv_bench.holding import Holding
from p2pkv_bench.keys import keys_at
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.publish import POOL_NBYTES, ROUND_NBYTES, Case
from p2pkv_bench.references import MEMCPY
from p2pkv_bench.rounds import Call, Contestant, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row
from p2pkv_bench.working_set import Destination, Rotation, Source, checksums

IN_PROCESS = "in process"
_ENGINE, _NODE = "engine", "node"
_MOST_TOUCHED = 256 * MIB
"""No more than this is read of a pool, since five pools of it are there at once."""
_MAPS_IN = "p2pkv-prefault\n"
"""A thread that maps memory in is called so."""
_MAPPED_IN_S = 60.0


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure publishes, fetches from the own host and from another, and what attaching takes."""
    plan = replace(plan, threads=(1,), working_set=min(plan.working_set, _MOST_TOUCHED))
    yield from _publishes(meeting, plan)
    with Meeting() as another:
        yield from _local_fetches(another, plan)
    with Meeting() as another:
        yield from _remote_fetches(another, plan)
    yield from attached_engines.rows(plan)


def _shapes(plan: Plan) -> Iterator[tuple[int, int]]:
    for page_nbytes in plan.pages:
        for batch in plan.batches:
            if page_nbytes * batch <= ROUND_NBYTES and plan.fits(page_nbytes, batch, 1):
                yield page_nbytes, batch


class Ends(Holding):
    """An engine and a node in this process, the engine's host in another; pools of one size, memory of both."""

    def __init__(self, meeting: Meeting, plan: Plan, pool_nbytes: int) -> None:
        with ExitStack() as undo:
            self._meeting = meeting
            self._path = path_of(meeting)
            host = undo.enter_context(Peer())
            config = meeting.settings(
                HOST, attach_listen=self._path, pool_size=pool_nbytes, transports=["shm"]
            )
            host.call("start", config=config, working_set=0)
            self.source = Source(plan.working_set)
            self.destination = Destination(plan.working_set)
            self.node = undo.enter_context(meeting.start(_NODE, pool_size=pool_nbytes, transports=["shm"]))
            self._register(self.node)
            host.call("wait_for", n_members=2)
            self.engine = undo.enter_context(self.attach())
            self._undo = undo.pop_all()

    def attach(self) -> Node:
        """Start one more engine; the caller closes it."""
        engine = self._meeting.start(_ENGINE, attach=self._path, transports=["shm"])
        self._register(engine)
        return engine

    def _register(self, node: Node) -> None:
        self.source.register(node, readable=False)
        node.register_memory(self.destination.array)


def _publishes(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    with Ends(meeting, plan, POOL_NBYTES) as ends:
        for page_nbytes, batch in _shapes(plan):
            plan.tell(f"attach: publish, {page_nbytes // KIB} KiB, {batch} a call")
            attached = Case(ends, plan, page_nbytes, batch, 1, node=ends.engine, shard=HOST)
            own = Case(ends, plan, page_nbytes, batch, 1, node=ends.node, shard=_NODE)
            attached.fill()
            own.fill()
            yield _row(
                plan,
                "publish into a full pool",
                {
                    "attached": attached.publish,
                    IN_PROCESS: own.publish,
                    MEMCPY: partial(own.copy, is_chosen=False),
                },
                page_nbytes,
                batch,
                least={1: None, 8: 0.8, 32: 0.9},
            )


def _local_fetches(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    with Ends(meeting, plan, plan.working_set * 5 // 2 + MIB) as ends:
        for page_nbytes in plan.pages:
            pages = {
                node.node_id: LocalPages(ends, node, shard, page_nbytes)
                for node, shard in ((ends.engine, HOST), (ends.node, _NODE))
            }
            for batch in (batch for size, batch in _shapes(plan) if size == page_nbytes):
                plan.tell(f"attach: fetch from the own host, {page_nbytes // KIB} KiB, {batch} a call")
                n_calls = plan.n_calls(page_nbytes, batch, 1)
                own = partial(pages[_NODE].fetch, n_calls, batch)
                yield _row(
                    plan,
                    "fetch from the own host, look-up cached, touched before",
                    {"attached": partial(pages[_ENGINE].fetch, n_calls, batch), IN_PROCESS: own},
                    page_nbytes,
                    batch,
                    least={1: None, 32: 0.95},
                )
                yield _row(
                    plan,
                    "fetch from the own host by an engine that was just started",
                    {"attached": partial(pages[_ENGINE].fetch_anew, n_calls, batch), IN_PROCESS: own},
                    page_nbytes,
                    batch,
                    least={1: None, 32: 0.75},
                )
                mapped_in = partial(pages[_ENGINE].fetch_anew, n_calls, batch, is_mapped_in=True)
                yield _row(
                    plan,
                    "fetch from the own host by an engine that was just started and has mapped the pool in",
                    {"attached": mapped_in, IN_PROCESS: own},
                    page_nbytes,
                    batch,
                    least={1: None, 32: 0.9},
                )


class LocalPages:
    """All pages of one size in the pool of a node, published by it or by an engine that is attached to it."""

    def __init__(self, ends: Ends, node: Node, shard: str, page_nbytes: int) -> None:
        self._ends = ends
        self._node = node
        self._rows = ends.source.pages(page_nbytes)
        self._expected = ends.source.checksums(page_nbytes)
        self._keys = keys_at(node, shard, f"local-{node.node_id}-{page_nbytes}", len(self._rows))
        self._pages = Rotation(len(self._keys))
        self._slots = ends.destination.slots(page_nbytes)
        self._slot_rotation = Rotation(len(self._slots))
        step = max(1, min(512, 8 * MIB // page_nbytes))
        for first in range(0, len(self._keys), step):
            part = slice(first, first + step)
            if not node.publish(self._keys[part], self._rows[part]).all():
                raise BenchError(f"pages of {page_nbytes} bytes found no room")
        self.fetch(len(self._keys) // step, step)  # maps the pool in

    def fetch(self, n_calls: int, batch: int) -> float:
        """Fetch so many batches; return GB/s."""
        return self._fetch_by(self._node, n_calls, batch)

    def fetch_anew(self, n_calls: int, batch: int, *, is_mapped_in: bool = False) -> float:
        """Do so with an engine that has read nothing yet, no page twice; return GB/s.

        ``is_mapped_in``: when its thread has mapped the pool in, as it does from its start on.
        """
        with self._ends.attach() as engine:
            if is_mapped_in:
                _wait_until_nothing_is_mapped_in()
            return self._fetch_by(engine, min(n_calls, len(self._keys) // batch), batch)

    def _fetch_by(self, node: Node, n_calls: int, batch: int) -> float:
        nbytes = self._rows.shape[1]
        moves = [(self._pages.take(batch), self._slot_rotation.take(batch)) for _ in range(n_calls)]
        for page, _ in moves:
            node.exists(self._keys[page : page + batch])
        calls: list[Call] = [
            partial(self._fetch_one, node, page, self._slots[slot : slot + batch]) for page, slot in moves
        ]
        seconds = timed([calls])
        for page, slot in moves[-(len(self._slots) // batch) :]:  # later ones lie where earlier ones did
            found = checksums(self._slots[slot : slot + batch])
            if not np.array_equal(found, self._expected[page : page + batch]):
                raise BenchError(f"wrong bytes in pages {page} to {page + batch - 1}")
        return n_calls * batch * float(nbytes) / seconds / 1e9

    def _fetch_one(
        self, node: Node, page: int, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    ) -> None:
        if not node.fetch(self._keys[page : page + len(rows)], rows).all():
            raise BenchError("pages that are there were not fetched")


def _wait_until_nothing_is_mapped_in() -> None:
    """Wait for all threads of this process that map memory in."""
    until = time.monotonic() + _MAPPED_IN_S
    while any(path.read_text() == _MAPS_IN for path in Path("/proc/self/task").glob("*/comm")):
        if time.monotonic() > until:
            raise BenchError(f"a pool was not mapped in within {_MAPPED_IN_S} s")
        time.sleep(0.01)


def _remote_fetches(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Read pages of a third node over tcp, by an engine and by a node of this process."""
    with Pair(meeting, "tcp", plan.working_set) as pair, ExitStack() as undo:
        host = undo.enter_context(Peer())
        path = path_of(meeting)
        config = meeting.settings(HOST, attach_listen=path, pool_size=16 * MIB, transports=["shm", "tcp"])
        host.call("start", config=config, working_set=0)
        pair.owner.call("wait_for", n_members=3)
        engine = undo.enter_context(meeting.start(_ENGINE, attach=path, transports=["tcp"]))
        engine.register_memory(pair.destination.array)
        for page_nbytes in plan.pages:
            pages = Pages(pair, page_nbytes)
            for node in (engine, pair.node):
                read_once(node, pages)
            for batch in (batch for size, batch in _shapes(plan) if size == page_nbytes):
                plan.tell(f"attach: fetch from another host, {page_nbytes // KIB} KiB, {batch} a call")
                yield _row(
                    plan,
                    "fetch from another host, look-up cached",
                    {
                        "attached": partial(_fetch_remote, engine, pages, plan, batch),
                        IN_PROCESS: partial(_fetch_remote, pair.node, pages, plan, batch),
                    },
                    page_nbytes,
                    batch,
                    least={1: None, 32: 0.9},
                    transport="tcp",
                )


def _fetch_remote(node: Node, pages: Pages, plan: Plan, batch: int) -> float:
    n_calls = plan.n_calls(pages.nbytes, batch, 1)
    moves: Sequence[Move] = pages.next_moves(n_calls, batch)
    for move in moves:
        node.exists(move.keys)
    seconds = timed([[partial(fetch_all, node, move) for move in moves]])
    pages.verify(moves)
    nbytes: int = n_calls * batch * pages.nbytes
    return nbytes / seconds / 1e9


def _row(
    plan: Plan,
    case: str,
    contestants: dict[str, Contestant],
    page_nbytes: int,
    batch: int,
    *,
    least: dict[int, float | None],
    transport: str = "",
) -> Row:
    """Compare; ``least`` of the ratio to the one in process is asked for by the number of pages a call."""
    bound = least[max(n for n in least if n <= batch)] if page_nbytes >= 64 * KIB else None
    return make_row(
        take_turns(contestants, plan.rounds),
        suite="attach",
        case=case,
        unit="GB/s",
        transport=transport,
        page_nbytes=page_nbytes,
        batch=batch,
        target=None if bound is None else Target(bound, IN_PROCESS),
    )
