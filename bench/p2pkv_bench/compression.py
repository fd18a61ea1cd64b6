"""What it costs to keep pages packed (docs/codec.md), and what it gains.

For a pool of this process in processor time: that says the same on a busy machine. The pages lie in cold memory, and
what a publish and a fetch do beside packing is in it. So is what is fetched over shm from a node of this process, where
the reader does all the work. Over other transports the clock counts, since there a sender works too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from p2pkv.config import COMPRESSION
from p2pkv.node import Node
from p2pkv.pool import FetchStatus, Pool, PoolStatus
from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import take_turns
from p2pkv_bench.rows import KIB, MIB, Row, make_row

_NBYTES = 64 * MIB
"""Published and fetched in a round."""
_BATCH = 32
_PATIENCE_S = 30.0
_UNIT = "GB/s of one core"
_OFF, _LOSSLESS, _ = COMPRESSION


def _normal() -> NDArray[np.float32]:
    """Return numbers of channels that differ in scale, as those of keys do."""
    random = np.random.default_rng(1)
    scales = np.exp(random.standard_normal(128)).astype(np.float32)
    numbers = random.standard_normal((_NBYTES // 2 // 128, 128), np.float32) * scales
    return numbers.ravel()


def _bfloat16() -> NDArray[np.uint8]:
    # as bfloat16 rounds, towards zero
    halves = (_normal().view(np.uint32) >> 16).astype(np.uint16)
    raw: NDArray[np.uint8] = halves.view(np.uint8)
    return raw


def _float16() -> NDArray[np.uint8]:
    raw: NDArray[np.uint8] = _normal().astype(np.float16).view(np.uint8)
    return raw


def _noise() -> NDArray[np.uint8]:
    return np.random.default_rng(2).integers(0, 256, _NBYTES, np.uint8)


_KINDS: Mapping[str, Callable[[], NDArray[np.uint8]]] = {
    "bfloat16": _bfloat16,
    "float16": _float16,
    "random bytes": _noise,
}


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Publish and fetch pages of each size: packed, as they are, and by a plain copy of the same bytes."""
    for page_nbytes in plan.pages:
        if not 16 * KIB <= page_nbytes <= 4 * MIB:
            continue
        for kind, make in _KINDS.items():
            plan.tell(f"compression, {kind}, {page_nbytes // KIB} KiB")
            yield from _rows(plan, kind, make().reshape(-1, page_nbytes))
    for transport in plan.transports:
        plan.tell(f"compression, fetch over {transport}")
        yield from _rows_between_nodes(meeting, plan, transport)


def _rows(plan: Plan, kind: str, pages: NDArray[np.uint8]) -> Iterator[Row]:
    pools = {"p2pkv": _Pages(_LOSSLESS, pages), "as they are": _Pages(_OFF, pages)}
    copied = np.zeros_like(pages)
    writes = take_turns(
        {**{name: one.publish for name, one in pools.items()}, "memcpy": partial(_copy, copied, pages)},
        plan.rounds,
    )
    reads = take_turns(
        {**{name: one.fetch for name, one in pools.items()}, "memcpy": partial(_copy, copied, pages)},
        plan.rounds,
    )
    ratio = pages.nbytes / pools["p2pkv"].used
    row = partial(make_row, suite="compression", unit=_UNIT, page_nbytes=pages.shape[1], batch=_BATCH)
    yield row(writes, case=f"publish {kind}, {ratio:.2f} times smaller in the pool")
    yield row(reads, case=f"fetch {kind}")
    for one in pools.values():
        one.close()


def _rows_between_nodes(meeting: Meeting, plan: Plan, transport: str) -> Iterator[Row]:
    now, unit = (time.process_time, _UNIT) if transport == "shm" else (time.perf_counter, "GB/s")
    pages = _bfloat16().reshape(-1, MIB)
    out = np.zeros_like(pages)
    with ExitStack() as undo:
        start = partial(meeting.start, transports=[transport], pool_size=pages.nbytes + 16 * MIB)
        reader = undo.enter_context(start(f"{transport}-reader"))
        reader.register_memory(out)
        fetches: dict[str, Callable[[], float]] = {}
        for name, compression in (("p2pkv", _LOSSLESS), ("as they are", _OFF)):
            owner = undo.enter_context(start(f"{transport}-{compression}", compression=compression))
            owner.register_memory(pages)
            keys = [f"{transport}-{compression}-{i}" for i in range(len(pages))]
            if not owner.publish(keys, pages, timeout=_PATIENCE_S).all():
                raise BenchError("the pool did not take what it has room for")
            fetches[name] = partial(_fetch, reader, keys, pages, out, now=now)
        yield make_row(
            take_turns(fetches, plan.rounds),
            suite="compression",
            case="fetch bfloat16 from a node of this process",
            unit=unit,
            transport=transport,
            page_nbytes=MIB,
            batch=_BATCH,
        )


def _fetch(
    reader: Node,
    keys: list[str],
    pages: NDArray[np.uint8],
    out: NDArray[np.uint8],
    *,
    now: Callable[[], float],
) -> float:
    """Fetch all pages, whose places were looked up, and compare them; return GB a second."""
    until = time.monotonic() + _PATIENCE_S
    while not reader.exists(keys).all():
        if time.monotonic() > until:
            raise BenchError("the reader does not find what was published")
        time.sleep(0.01)
    out[:, :8] = 0
    began = now()
    hits = [
        reader.fetch(keys[first : first + _BATCH], out[first : first + _BATCH], timeout=_PATIENCE_S)
        for first in range(0, len(keys), _BATCH)
    ]
    seconds = now() - began
    if not np.concatenate(hits).all() or not np.array_equal(out, pages):
        raise BenchError("not all pages came, or wrong bytes did")
    return pages.nbytes / seconds / 1e9


def _copy(to: NDArray[np.uint8], pages: NDArray[np.uint8]) -> float:
    began = time.process_time()
    np.copyto(to, pages)
    return pages.nbytes / (time.process_time() - began) / 1e9


class _Pages:
    """A pool that takes the same pages over and over."""

    def __init__(self, compression: str, pages: NDArray[np.uint8]) -> None:
        self._pages = pages
        self._pool = Pool(pages.nbytes + 16 * MIB, owner=1, boot=1, compression=compression)
        self._out = np.zeros_like(pages)
        self._keys = np.zeros((len(pages), 16), np.uint8)
        self._keys.view(np.uint64)[:, 0] = np.arange(len(pages), dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )

    @property
    def used(self) -> int:
        """Bytes of the pool that the pages take."""
        return int(self._pool.stats()["used"])

    def publish(self) -> float:
        """Publish all pages; return GB a second of processor time."""
        self._pool.retract(self._keys)
        began = time.process_time()
        for part in self._parts():
            published = self._pool.publish(self._keys[part], _pieces(self._pages[part]))
            if (published.statuses != PoolStatus.STORED).any():
                raise BenchError("the pool did not take what it has room for")
        return self._pages.nbytes / (time.process_time() - began) / 1e9

    def fetch(self) -> float:
        """Fetch all pages and compare them; return GB a second of processor time."""
        self._out[:, :8] = 0
        began = time.process_time()
        for part in self._parts():
            if (self._pool.fetch(self._keys[part], _pieces(self._out[part])) != FetchStatus.HIT).any():
                raise BenchError("the pool lost pages that it had room for")
        seconds = time.process_time() - began
        if not np.array_equal(self._out, self._pages):
            raise BenchError("wrong bytes came from the pool")
        return self._pages.nbytes / seconds / 1e9

    def _parts(self) -> Iterator[slice]:
        for first in range(0, len(self._pages), _BATCH):
            yield slice(first, min(len(self._pages), first + _BATCH))

    def close(self) -> None:
        self._pool.close()
        self._pool.release_memory()


def _pieces(rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    pieces = np.empty((len(rows), 1, 2), np.int64)
    pieces[:, 0, 0] = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    pieces[:, 0, 1] = rows.shape[1]
    return pieces
