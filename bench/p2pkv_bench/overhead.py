"""What a fetch costs beyond copies and look-up: arguments, hashing, planning, leasing, counting.

Measured with pages of 64 bytes over shm, look-up cached: the time of ``Node.fetch``, less that of copying the
same bytes page by page, less that of asking a location cache for the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from p2pkv import _native
from p2pkv.page import LOCATION, Keys, Namespace
from p2pkv_bench import references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile, take_turns, timed_calls
from p2pkv_bench.rows import MIB, Row, Target, make_row

_PAGE_NBYTES = 64
_BATCHES = (1, 32, 128, 512)
_CALLS = 300
_PAGES = 4096
_WORKING_SET = 64 * MIB
_PER_PAGE_US = 0.1
_PER_CALL_US = 20.0


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure a few sizes of batches, from one thread."""
    with Pair(meeting, "shm", _WORKING_SET) as pair:
        pages = Pages(pair, _PAGE_NBYTES, most=_PAGES)
        for batch in _BATCHES:
            plan.tell(f"overhead, {batch} pages a call")
            case = _Case(pair, pages.next_moves(1, batch)[0])
            parts = {"fetch": case.fetch, "copies": case.copy, "cached look-up": case.look_up}
            figures = take_turns(parts, plan.rounds)
            for move in case.moves:
                pages.verify([move])
            beyond = [
                fetch - copies - look_up for fetch, copies, look_up in zip(*figures.values(), strict=True)
            ]
            yield make_row(
                {"p2pkv": beyond} | figures,
                suite="overhead",
                case="fetch, less copies and look-up",
                unit="us",
                transport="shm",
                page_nbytes=_PAGE_NBYTES,
                batch=batch,
                target=Target(_PER_CALL_US + _PER_PAGE_US * batch, at_most=True) if batch == 128 else None,
            )


class _Case:
    """One batch; each method returns the microseconds of its median call."""

    def __init__(self, pair: Pair, move: Move) -> None:
        self._pair = pair
        self.moves = [move]
        self._ids: Keys = Namespace(pair.node.config.namespace).hash(move.keys)
        self._cache = _native.LocationCache(65536, 60.0)
        self._cache.put(self._ids, np.zeros((len(self._ids), LOCATION.itemsize), np.uint8))

    def fetch(self) -> float:
        (move,) = self.moves
        self._pair.node.exists(move.keys)
        if not self._pair.node.fetch(move.keys, move.rows).all():
            raise BenchError("pages that are there were not fetched")
        return _median_us(lambda: self._pair.node.fetch(move.keys, move.rows))

    def copy(self) -> float:
        (move,) = self.moves
        pages = self._pair.source.pages(_PAGE_NBYTES)
        return _median_us(references.copy(pages, move.page, move.rows, is_chosen=False))

    def look_up(self) -> float:
        return _median_us(lambda: self._cache.get(self._ids))


def _median_us(call: Callable[[], object]) -> float:
    return percentile(timed_calls([call] * _CALLS), 50) * 1e6
