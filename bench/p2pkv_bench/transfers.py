"""Transfers between two processes: gets, puts, the cost of an offer, and layers offered while others are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import count

from p2pkv_bench import references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import OWNER, Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Contestant, percentile, take_turns, timed, timed_calls
from p2pkv_bench.rows import KIB, Row, make_row
from p2pkv_bench.transfer_ends import row_spans

_LATENCY_NBYTES = 64 * KIB
_LATENCY_CALLS = 200
_SMALL_OFFERS = 256
_LAYERS = 32
_LAYER_PAGES = 16
_LAYER_NBYTES = 64 * KIB
_COMPUTE_S = 0.001
"""A layer of the simulated prefill: slept, so that the processor is free for the transfer as a GPU would leave it."""


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure every case of the plan."""
    for transport in plan.transports:
        with Pair(meeting, transport, plan.working_set, readable=True) as pair, ExitStack() as undo:
            streams = None
            if transport != "shm":
                streams = undo.enter_context(closing(references.Streams(pair, 1)))
            bench = _Bench(pair, plan, streams)
            for page_nbytes in plan.pages:
                for batch in plan.batches:
                    if plan.fits(page_nbytes, batch, 1):
                        yield from bench.bandwidth(page_nbytes, batch)
            yield bench.latency("get, one row", is_put=False)
            yield bench.latency("put, one row, granted", is_put=True)
            yield bench.offers()
            yield bench.layers()


class _Bench:
    """Requests of one pair of processes; both have all pages and slots."""

    def __init__(self, pair: Pair, plan: Plan, streams: references.Streams | None) -> None:
        self._pair = pair
        self._plan = plan
        self._streams = streams
        self._transfers = pair.node.transfers
        self._serial = count()

    def bandwidth(self, page_nbytes: int, batch: int) -> Iterator[Row]:
        """Yield a row for gets and one for puts, beside copies or a raw stream of the same bytes."""
        pages = Pages(self._pair, page_nbytes, publish=False)
        n_calls = self._plan.n_calls(page_nbytes, batch, 1)
        for case, ours in (("get", self._get_round), ("put, granted", self._put_round)):
            what = f"{page_nbytes // KIB} KiB, {batch} a call"
            self._plan.tell(f"transfers, {self._pair.transport}, {case}, {what}")
            contestants: dict[str, Contestant] = {"p2pkv": partial(ours, pages, n_calls, batch)}
            contestants |= self._references(pages, n_calls, batch)
            yield make_row(
                take_turns(contestants, self._plan.rounds),
                suite="transfers",
                case=case,
                unit="GB/s",
                transport=self._pair.transport,
                page_nbytes=page_nbytes,
                batch=batch,
            )

    def _references(self, pages: Pages, n_calls: int, batch: int) -> dict[str, Contestant]:
        def run(*, is_chosen: bool | None) -> float:
            moves = [pages.next_moves(n_calls, batch)]
            if is_chosen is not None:
                calls = references.copies(self._pair, moves, is_chosen=is_chosen)
            else:
                assert self._streams is not None
                calls = self._streams.by_call(moves, n_streams=1)
            return n_calls * batch * pages.nbytes / timed(calls) / 1e9

        found: dict[str, Contestant] = {references.MEMCPY: partial(run, is_chosen=False)}
        if self._streams is not None:
            found[references.stream_name(1)] = partial(run, is_chosen=None)
        return found

    def _get_round(self, pages: Pages, n_calls: int, batch: int) -> float:
        moves = pages.next_moves(n_calls, batch)
        calls = self.get_calls(moves)
        seconds = timed([calls])
        pages.verify(moves)
        return n_calls * batch * pages.nbytes / seconds / 1e9

    def _put_round(self, pages: Pages, n_calls: int, batch: int) -> float:
        moves = pages.next_moves(n_calls, batch)
        calls = self.put_calls(moves)
        seconds = timed([calls])
        self._verify(moves)
        return n_calls * batch * pages.nbytes / seconds / 1e9

    def get_calls(self, moves: list[Move]) -> list[partial[None]]:
        """Let the other process offer what the moves take; return a get for each."""
        names = [f"get {next(self._serial)}" for _ in moves]
        nbytes = moves[0].rows.shape[1]
        offered = [(name, move.page, move.batch) for name, move in zip(names, moves, strict=True)]
        self._pair.owner.call("offer", calls=offered, page_nbytes=nbytes)
        return [partial(self._get, name, move) for name, move in zip(names, moves, strict=True)]

    def _get(self, name: str, move: Move) -> None:
        nbytes = move.rows.shape[1]
        spans = row_spans(move.rows.ctypes.data, 0, move.batch, nbytes)
        if self._transfers.get(OWNER, name, spans).any():
            raise BenchError("rows that are offered were not got")

    def put_calls(self, moves: list[Move]) -> list[partial[None]]:
        """Let the other process grant slots for the moves; return a put for each."""
        names = [f"put {next(self._serial)}" for _ in moves]
        nbytes = moves[0].rows.shape[1]
        slots = [(move.rows.ctypes.data - self._pair.destination.address) // nbytes for move in moves]
        granted = [(name, slot, move.batch) for name, slot, move in zip(names, slots, moves, strict=True)]
        self._pair.owner.call("grant", calls=granted, page_nbytes=nbytes)
        return [partial(self._put, name, move) for name, move in zip(names, moves, strict=True)]

    def _put(self, name: str, move: Move) -> None:
        spans = row_spans(self._pair.source.address, move.page, move.batch, move.rows.shape[1])
        if self._transfers.put(OWNER, name, spans).any():
            raise BenchError("rows that are granted were not put")

    def _verify(self, moves: list[Move]) -> None:
        nbytes = moves[0].rows.shape[1]
        pages = [move.page for move in moves]
        if not self._pair.owner.call("verify_grants", pages=pages, page_nbytes=nbytes):
            raise BenchError("the other process does not have what was put")

    def latency(self, case: str, *, is_put: bool) -> Row:
        """Return the median time of a call of one small row."""
        self._plan.tell(f"transfers, {self._pair.transport}, {case}")
        pages = Pages(self._pair, _LATENCY_NBYTES, publish=False)

        def run() -> float:
            moves = pages.next_moves(_LATENCY_CALLS, 1)
            seconds = timed_calls(self.put_calls(moves) if is_put else self.get_calls(moves))
            if is_put:
                self._verify(moves)
            return percentile(seconds, 50) * 1e6

        return self._us_row(case, {"p2pkv": run}, batch=1, page_nbytes=_LATENCY_NBYTES)

    def offers(self) -> Row:
        """Return what one of many small asynchronous puts of a request costs its caller."""
        pages = Pages(self._pair, 4 * KIB, publish=False)

        def run() -> float:
            (move,) = pages.next_moves(1, _SMALL_OFFERS)
            name = f"small {next(self._serial)}"
            slot = (move.rows.ctypes.data - self._pair.destination.address) // pages.nbytes
            self._pair.owner.call("grant", calls=[(name, slot, move.batch)], page_nbytes=pages.nbytes)
            spans = row_spans(self._pair.source.address, move.page, move.batch, pages.nbytes)
            began = time.perf_counter()
            offers = [
                self._transfers.put_async(OWNER, name, spans[i : i + 1], first_row=i)
                for i in range(_SMALL_OFFERS)
            ]
            seconds = time.perf_counter() - began
            if any(offer.wait(10.0).any() for offer in offers):
                raise BenchError("rows that are granted were not put")
            self._verify([move])
            return seconds / _SMALL_OFFERS * 1e6

        return self._us_row("put_async, time of one", {"p2pkv": run}, batch=1, page_nbytes=4 * KIB)

    def layers(self) -> Row:
        """Return the time until the receiver has all layers: each offered when it is computed, or all at the end."""
        self._plan.tell(f"transfers, {self._pair.transport}, layers")
        pages = Pages(self._pair, _LAYER_NBYTES, publish=False)
        contestants: dict[str, Contestant] = {
            "p2pkv": partial(self._prefill, pages, is_layer_wise=True),
            "offered at the end": partial(self._prefill, pages, is_layer_wise=False),
            "the computation": self._compute,
        }
        case = f"{_LAYERS} layers of {_COMPUTE_S * 1e3:g} ms, until the receiver has them"
        return self._us_row(case, contestants, batch=_LAYER_PAGES, page_nbytes=_LAYER_NBYTES)

    def _prefill(self, pages: Pages, *, is_layer_wise: bool) -> float:
        (move,) = pages.next_moves(1, _LAYERS * _LAYER_PAGES)
        name = f"layers {next(self._serial)}"
        slot = (move.rows.ctypes.data - self._pair.destination.address) // pages.nbytes
        self._pair.owner.call("grant", calls=[(name, slot, move.batch)], page_nbytes=pages.nbytes)
        spans = row_spans(self._pair.source.address, move.page, move.batch, pages.nbytes)
        put = partial(self._transfers.put_async, OWNER, name)
        offers = []
        began = time.perf_counter()
        for layer in range(_LAYERS):
            time.sleep(_COMPUTE_S)
            first = layer * _LAYER_PAGES
            if is_layer_wise:
                offers.append(put(spans[first : first + _LAYER_PAGES], first_row=first))
        if not is_layer_wise:
            offers.append(put(spans))
        if any(offer.wait(10.0).any() for offer in offers):
            raise BenchError("rows that are granted were not put")
        seconds = time.perf_counter() - began
        self._verify([move])
        return seconds * 1e6

    def _compute(self) -> float:
        began = time.perf_counter()
        for _ in range(_LAYERS):
            time.sleep(_COMPUTE_S)
        return (time.perf_counter() - began) * 1e6

    def _us_row(self, case: str, contestants: dict[str, Contestant], *, batch: int, page_nbytes: int) -> Row:
        return make_row(
            take_turns(contestants, self._plan.rounds),
            suite="transfers",
            case=case,
            unit="us",
            transport=self._pair.transport,
            page_nbytes=page_nbytes,
            batch=batch,
        )
