"""Every transport that can run here, side by side: the same pages, read and validated without nodes around them.

All of them take turns in one run, with copies, raw streams and, where they are installed, the fabric's own programs. A
row a transport and case; beside its throughput how long single calls took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pkv.page import Locations, as_locations
from p2pkv.transports.base import Endpoint, MemoryRegion, RemoteRegion, Status, Transport
from p2pkv_bench import bare, outside, references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Call, Contestant, percentile, take_turns, timed
from p2pkv_bench.rows import KIB, Reference, Row, Spread, make_row

if TYPE_CHECKING:
    from typing_extensions import Self

_STREAMS = 2
_LATENCIES = (50, 99)


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure every case of the plan over every transport that can run on this machine."""
    chosen = [
        name
        for name in bare.names()
        if not plan.chosen_transports or name.partition(",")[0] in plan.chosen_transports
    ]
    with Pair(meeting, "shm", plan.working_set) as pair, ExitStack() as undo:
        streams = undo.enter_context(closing(references.Streams(pair, _STREAMS)))
        for page_nbytes in plan.pages:
            with _Readers(pair, meeting, chosen, page_nbytes, max(plan.threads)) as readers:
                plan.tell(f"transports, {page_nbytes // KIB} KiB: reads everything once")
                readers.read_once()
                for batch in plan.batches:
                    for threads in plan.threads:
                        if plan.fits(page_nbytes, batch, threads):
                            size = f"{page_nbytes // KIB} KiB"
                            plan.tell(f"transports, {size}, {batch} a call, {threads} threads")
                            yield from _Case(readers, streams, plan, batch, threads).rows()


class _Reader:
    """One transport: an endpoint for each thread."""

    def __init__(self, name: str, pair: Pair, n_endpoints: int, region: str) -> None:
        self.name = name
        self._transport: Transport = bare.start(name)
        array = pair.destination.array
        self._local: MemoryRegion = self._transport.register_memory(
            array, array.ctypes.data, array.nbytes, readable=False
        )
        self._ends: list[tuple[Endpoint, RemoteRegion]] = []
        for _ in range(n_endpoints):
            endpoint = self._transport.open()
            half = pair.owner.call("accept", transport=name, half=endpoint.describe().hex())
            endpoint.bind(bytes.fromhex(half))
            self._ends.append((endpoint, endpoint.attach(bytes.fromhex(region))))

    def calls(self, thread: int, moves: Sequence[Move], where: Locations) -> list[Call]:
        """Return calls that read each move over the endpoint of one thread, validated."""
        return [partial(self._read, thread, *_spans_and_words(move, where)) for move in moves]

    def _read(self, thread: int, spans: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
        endpoint, remote = self._ends[thread]
        statuses = endpoint.read(self._local, remote, spans, words=words).wait(10.0)
        if (statuses != Status.OK).any():
            raise BenchError(f"a read over {self.name} ended with statuses {np.unique(statuses).tolist()}")

    def close(self) -> None:
        for endpoint, _ in self._ends:
            endpoint.close()
        self._transport.close()


def _spans_and_words(move: Move, where: Locations) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    there = where[move.page : move.page + move.batch]
    spans = move.spans.copy()
    spans[:, 1] = there["offset"]
    return spans, np.stack([there["word_offset"], there["generation"]], axis=1)


class _Readers:
    """A pool at the owner with all pages of one size, and every transport to it."""

    def __init__(
        self, pair: Pair, meeting: Meeting, names: Sequence[str], page_nbytes: int, n_endpoints: int
    ) -> None:
        self.pair = pair
        self.pages = Pages(pair, page_nbytes, publish=False)
        file = meeting.folder / "locations.npy"
        with ExitStack() as undo:
            regions = pair.owner.call(
                "serve_pool", transports=list(names), page_nbytes=page_nbytes, locations=str(file)
            )
            undo.callback(partial(pair.owner.call, "drop_pool"))
            self.where = as_locations(np.load(file))
            self.readers = {
                name: undo.enter_context(closing(_Reader(name, pair, n_endpoints, regions[name])))
                for name in names
            }
            self._undo = undo.pop_all()

    def read_once(self) -> None:
        """Map everything in: the first read of a peer's memory would measure page faults."""
        moves = self.pages.next_moves(self.pages.n_pages // 8, 8)
        for reader in self.readers.values():
            timed([reader.calls(0, moves, self.where)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()


class _Case:
    """One batch and number of threads."""

    def __init__(
        self, readers: _Readers, streams: references.Streams, plan: Plan, batch: int, threads: int
    ) -> None:
        self._readers = readers
        self._streams = streams
        self._plan = plan
        self._batch = batch
        self._threads = threads
        self._n_calls = plan.n_calls(readers.pages.nbytes, batch, threads)
        self._latencies: dict[str, list[float]] = {name: [] for name in readers.readers}

    def rows(self) -> Iterator[Row]:
        ours = {name: partial(self._round, partial(self._read, name)) for name in self._readers.readers}
        others: dict[str, Contestant] = {
            references.MEMCPY: partial(
                self._round, partial(references.copies, self._readers.pair, is_chosen=False)
            )
        }
        for n in range(1, _STREAMS + 1):
            share = partial(self._streams.by_call, n_streams=n)
            others[references.stream_name(n)] = partial(self._round, share)
        figures = take_turns({**ours, **others}, self._plan.rounds)
        for name in ours:
            measured = {name: figures[name]} | {other: figures[other] for other in others}
            row = self._row(measured, name, "validated read", "GB/s")
            yield replace(row, references=(*row.references, *self._outside(name, row.value)))
            if self._threads == 1:
                for percent in _LATENCIES:
                    kept = self._latencies[name][self._n_calls :]  # without those of the round that warms up
                    seconds = [percentile(kept, percent) * 1e6]
                    yield self._row({name: seconds}, name, f"call, p{percent}", "us")

    def _outside(self, name: str, ours: Spread) -> list[Reference]:
        """Return what the fabric's own program makes of the same sizes, once, if it is installed."""
        figures: Mapping[str, float] = outside.measure(name, self._readers.pages.nbytes)
        return [
            Reference(
                program,
                Spread.of([value]),
                Spread(ours.median / value, ours.low / value, ours.high / value),
                ours.high / value,
            )
            for program, value in figures.items()
        ]

    def _row(self, figures: dict[str, list[float]], name: str, case: str, unit: str) -> Row:
        return make_row(
            figures,
            suite="transports",
            case=case,
            unit=unit,
            transport=name,
            page_nbytes=self._readers.pages.nbytes,
            batch=self._batch,
            threads=self._threads,
        )

    def _read(self, name: str, moves: Sequence[Sequence[Move]]) -> list[list[Call]]:
        reader = self._readers.readers[name]
        return [
            [partial(_timed_into, self._latencies[name], call) for call in calls]
            for calls in (reader.calls(i, part, self._readers.where) for i, part in enumerate(moves))
        ]

    def _round(self, prepare: Callable[[Sequence[Sequence[Move]]], Sequence[Sequence[Call]]]) -> float:
        pages = self._readers.pages
        moves = [pages.next_moves(self._n_calls, self._batch) for _ in range(self._threads)]
        seconds = timed(prepare(moves))
        for part in moves:
            pages.verify(part)
        return self._threads * self._n_calls * self._batch * pages.nbytes / seconds / 1e9


def _timed_into(seconds: list[float], call: Call) -> None:
    began = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - began)
