"""Fetch: the reader's memory is filled with pages of the other process, its look-up cached or asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from p2pkv.cache.page_cache import PageCache
from p2pkv.node import Node
from p2pkv.page import Namespace
from p2pkv.transports.native import TcpTransport
from p2pkv_bench import references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Call, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

_STREAMS = 4


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure every case of the plan."""
    for transport in plan.transports:
        with Pair(meeting, transport, plan.working_set) as pair, ExitStack() as undo:
            readers = {_name(transport): pair.node}
            streams = None
            if transport == "tcp":
                one = pair.reader("reader-1", [TcpTransport(streams=1)])
                readers["tcp, 1 stream"] = undo.enter_context(one)
            if transport != "shm":
                streams = undo.enter_context(closing(references.Streams(pair, _STREAMS)))
            for page_nbytes in plan.pages:
                pages = Pages(pair, page_nbytes)
                if page_nbytes == plan.pages[0]:
                    plan.tell(f"{transport}: reads everything once")
                    for node in readers.values():
                        read_once(node, pages)
                for name, node in readers.items():
                    # one stream is there to be compared with one raw stream; the rest is said by what is chosen
                    chosen = replace(plan, threads=plan.threads[:1]) if node is not pair.node else plan
                    yield from _Case(pair, pages, chosen, node, name, streams).rows()


def read_once(node: Node, pages: Pages) -> None:
    """Map the peer's memory in: the first read of it would measure page faults."""
    batch = max(1, min(pages.n_pages // 8, 16 * MIB // pages.nbytes))
    for move in pages.next_moves(pages.n_pages // batch, batch):
        fetch_all(node, move)


def _name(transport: str) -> str:
    return "tcp, streams as they pay" if transport == "tcp" else transport


class _Case:
    """One transport and size of pages, for all batches and threads."""

    def __init__(
        self, pair: Pair, pages: Pages, plan: Plan, node: Node, name: str, streams: references.Streams | None
    ) -> None:
        self._pair = pair
        self._pages = pages
        self._plan = plan
        self._node = node
        self._name = name
        self._streams = streams
        self._hash = Namespace(node.config.namespace).hash

    def rows(self) -> Iterator[Row]:
        for batch in self._plan.batches:
            for threads in self._plan.threads:
                if not self._plan.fits(self._pages.nbytes, batch, threads):
                    continue
                for is_cached in (True, False):
                    yield self._row(batch, threads, is_cached)

    def _row(self, batch: int, threads: int, is_cached: bool) -> Row:
        case = "look-up cached" if is_cached else "look-up asked for"
        size = f"{self._pages.nbytes // KIB} KiB"
        self._plan.tell(f"fetch, {self._name}, {size}, {batch} a call, {threads} threads, {case}")
        run = partial(self._round, batch, threads)
        contestants = {"p2pkv": partial(run, partial(self._fetch, is_cached))}
        if self._streams is None:
            for name, is_chosen in ((references.MEMCPY, False), (references.CHOSEN_COPY, True)):
                contestants[name] = partial(run, partial(references.copies, self._pair, is_chosen=is_chosen))
        else:
            for n in (1, 2, 4):
                share = partial(self._streams.by_call, n_streams=n)
                contestants[references.stream_name(n)] = partial(run, share)
            contestants[references.CONTINUOUS] = partial(run, self._streams.at_once)
        return make_row(
            take_turns(contestants, self._plan.rounds),
            suite="fetch",
            case=case,
            unit="GB/s",
            transport=self._name,
            page_nbytes=self._pages.nbytes,
            batch=batch,
            threads=threads,
            target=self._target(batch, threads) if is_cached else None,
        )

    def _target(self, batch: int, threads: int) -> Target | None:
        if self._pages.nbytes < 64 * KIB or batch < 32 or threads > 1:
            return None
        if self._streams is None:
            return Target(0.95, references.CHOSEN_COPY)
        least = {"tcp, streams as they pay": 1.6, "tcp, 1 stream": 0.95, "ucx": 0.7}[self._name]
        return Target(least, references.stream_name(1))

    def _round(
        self,
        batch: int,
        threads: int,
        prepare: Callable[[Sequence[Sequence[Move]]], Sequence[Sequence[Call]]],
    ) -> float:
        n_calls = self._plan.n_calls(self._pages.nbytes, batch, threads)
        moves = [self._pages.next_moves(n_calls, batch) for _ in range(threads)]
        seconds = timed(prepare(moves))
        for part in moves:
            self._pages.verify(part)
        return threads * n_calls * batch * self._pages.nbytes / seconds / 1e9

    def _fetch(self, is_cached: bool, moves: Sequence[Sequence[Move]]) -> list[list[Call]]:
        for part in moves:
            for move in part:
                if is_cached:
                    self._node.exists(move.keys)
                else:
                    # there is no public way to forget, because nothing but a benchmark needs one
                    cache = self._node._cache
                    assert isinstance(cache, PageCache)
                    cache.locations.drop(self._hash(move.keys))
        return [[partial(fetch_all, self._node, move) for move in part] for part in moves]


def fetch_all(node: Node, move: Move) -> None:
    """Fetch one call's pages; raises BenchError if any was not brought."""
    if not node.fetch(move.keys, move.rows).all():
        raise BenchError("pages that are there were not fetched")
