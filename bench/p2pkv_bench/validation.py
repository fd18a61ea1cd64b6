"""What it costs to prove a read: the same spans at transport level, with generation words and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pkv.page import as_locations
from p2pkv.transports import transport_class
from p2pkv.transports.base import Endpoint, MemoryRegion, RemoteRegion, Status, TransportSettings, Words
from p2pkv_bench import references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Call, take_turns, timed
from p2pkv_bench.rows import KIB, Row, Target, make_row

if TYPE_CHECKING:
    from typing_extensions import Self

_UNPROVEN = "the same read, not validated"


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure the pages and the larger batches of the plan, from one thread."""
    for transport in plan.transports:
        with Pair(meeting, transport, plan.working_set) as pair:
            for page_nbytes in plan.pages:
                with _Bare(pair, meeting, page_nbytes) as bare:
                    timed([bare.read(bare.pages.next_moves(bare.pages.n_pages // 8, 8), validated=True)])
                    for batch in [
                        batch for batch in plan.batches if batch >= 32 and plan.fits(page_nbytes, batch, 1)
                    ]:
                        plan.tell(f"validation, {transport}, {page_nbytes // KIB} KiB, {batch} a call")
                        yield _row(bare, plan, batch)


def _row(bare: _Bare, plan: Plan, batch: int) -> Row:
    n_calls = plan.n_calls(bare.pages.nbytes, batch, 1)

    def one_round(prepare: Callable[[list[Move]], list[Call]]) -> float:
        moves = bare.pages.next_moves(n_calls, batch)
        seconds = timed([prepare(moves)])
        bare.pages.verify(moves)
        return n_calls * batch * bare.pages.nbytes / seconds / 1e9

    contestants = {
        "p2pkv": partial(one_round, partial(bare.read, validated=True)),
        _UNPROVEN: partial(one_round, partial(bare.read, validated=False)),
    }
    if bare.pair.transport == "shm":
        contestants[references.CHOSEN_COPY] = partial(
            one_round, lambda moves: references.copies(bare.pair, [moves], is_chosen=True)[0]
        )
    return make_row(
        take_turns(contestants, plan.rounds),
        suite="validation",
        case="read at transport level",
        unit="GB/s",
        transport=bare.pair.transport,
        page_nbytes=bare.pages.nbytes,
        batch=batch,
        target=Target(0.95, _UNPROVEN) if bare.pages.nbytes == 64 * KIB else None,
    )


class _Bare:
    """A pool at the owner and an endpoint here, without nodes around them."""

    def __init__(self, pair: Pair, meeting: Meeting, page_nbytes: int) -> None:
        self.pair = pair
        self._transport = transport_class(pair.transport).create(TransportSettings())
        array = pair.destination.array
        self._local: MemoryRegion = self._transport.register_memory(
            array, array.ctypes.data, array.nbytes, readable=False
        )
        file = meeting.folder / "locations.npy"
        regions = pair.owner.call(
            "serve_pool", transports=[pair.transport], page_nbytes=page_nbytes, locations=str(file)
        )
        self._locations = as_locations(np.load(file))
        self._endpoint: Endpoint = self._transport.open()
        half = pair.owner.call("accept", transport=pair.transport, half=self._endpoint.describe().hex())
        self._endpoint.bind(bytes.fromhex(half))
        self._remote: RemoteRegion = self._endpoint.attach(bytes.fromhex(regions[pair.transport]))
        self.pages = Pages(pair, page_nbytes, publish=False)

    def read(self, moves: list[Move], *, validated: bool) -> list[Call]:
        calls: list[Call] = []
        for move in moves:
            there = self._locations[move.page : move.page + move.batch]
            spans = move.spans.copy()
            spans[:, 1] = there["offset"]
            words: Words | None = None
            if validated:
                words = np.stack([there["word_offset"], there["generation"]], axis=1)
            calls.append(partial(self._read_one, spans, words))
        return calls

    def _read_one(self, spans: NDArray[np.int64], words: Words | None) -> None:
        statuses = self._endpoint.read(self._local, self._remote, spans, words=words).wait(10.0)
        if (statuses != Status.OK).any():
            raise BenchError(f"a read ended with statuses {np.unique(statuses).tolist()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._endpoint.close()
        self._transport.close()
        self.pair.owner.call("drop_pool")
