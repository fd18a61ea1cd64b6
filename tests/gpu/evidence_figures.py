"""What evidence measures, in a process of its own: pages into devices, rows between them, and hunts for wrong bytes.

Each figure is a line of JSON on stdout, as soon as it is there. Small sizes come first; by what they took it is known
how often a larger one can be repeated, and one that there is no time for is left out, and says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from cluster import Cluster, NodeProcess
from device_buffers import KINDS, DeviceBuffer
from gpu.evidence_hunts import (
    EMULATED_SHARE,
    LENT,
    Figure,
    Measure,
    hunt_between_devices,
    hunts_over,
    settings_of,
)
from p2pkv import Node, Pieces
from pair import Pair

_PAGES = ((64 << 10, 128), (256 << 10, 128), (1 << 20, 64))
_PIECES = ((8 << 10, 64), (16 << 10, 64), (64 << 10, 32))
"""Bytes of a piece, and how many make up a page: what vLLM's layers of K and V are."""
_PAGES_OF_PIECES = 128
_ROWS = ((64 << 10, 512), (1 << 20, 128), (8 << 20, 32))
_FEWEST, _MOST = 3, 7
"""Rounds of a figure, whose median counts."""
_ROUNDS_FOR_PREPARING = 10
"""About so many rounds' time goes into filling, clearing and comparing."""
_WARMING = 5
"""Rounds that do not count: each locks 64 MiB of a pool, which the next ones find locked."""

T = TypeVar("T")


class Pace:
    """Says how often a case can be repeated within its share of a time."""

    def __init__(self, seconds: float, n_cases: int) -> None:
        self._until = time.monotonic() + seconds
        self._n_left = n_cases
        self._per_byte = 0.0

    def why_not(self, nbytes: int) -> str:
        """Say of the next case why it is left out, by what the last one took; "" if it is not."""
        left = self._until - time.monotonic()
        wanted = (_FEWEST + _ROUNDS_FOR_PREPARING) * self._per_byte * nbytes
        self._n_left -= 1
        return f"it takes some {wanted:.0f} s, and {max(left, 0):.0f} s are left" if wanted > left else ""

    def rounds(self, took: float, nbytes: int) -> int:
        """Return how many rounds to make, if the first has taken so long."""
        self._per_byte = took / nbytes
        share = (self._until - time.monotonic()) / (self._n_left + 1)
        return max(_FEWEST, min(_MOST, int(share / took) - _ROUNDS_FOR_PREPARING))


def amounts(cases: Sequence[tuple[int, int]], kind: str) -> list[tuple[int, int]]:
    """Return ``(bytes, how many)`` of each case, for device memory of that kind."""
    share = EMULATED_SHARE if kind == "emulated" else 1
    return [(nbytes, n // share) for nbytes, n in cases]


def measure_pages(kind: str, seconds: float) -> Iterator[Figure]:
    """Fetch pages into device memory and publish them from there, beside a copy of as many page-locked bytes."""
    half = seconds / 2
    yield from measure_fetches(kind, half)
    yield from measure_pieces(kind, half)


def measure_pieces(kind: str, seconds: float) -> Iterator[Figure]:
    """Fetch pages whose pieces lie apart in device memory, and publish them."""
    pace = Pace(seconds, 2 * len(_PIECES) * len(LENT))
    for (nbytes, n_pieces), blocks in product(_PIECES, LENT):
        by = f", by a kernel of {blocks} blocks" if blocks else ""
        n_pages = _PAGES_OF_PIECES // (EMULATED_SHARE if kind == "emulated" else 1)
        figure: Figure = {"n": n_pages, "nbytes": nbytes * n_pieces}
        total = n_pages * nbytes * n_pieces
        if why := pace.why_not(total):
            yield figure | {"what": f"in pieces of {nbytes >> 10} KiB{by}", "left_out": why}
            continue
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
            settings = settings_of(kind) | {"device_kernel_blocks": blocks}
            pair = Pair(Path(folder), transports=["shm"], pool_size=2 * total, **settings)
            buffer = KINDS[kind](2 * total)
            try:
                for way, found in _move_pieces(pair, buffer, n_pages, n_pieces, nbytes, pace):
                    yield figure | {"what": f"{way} in pieces of {nbytes >> 10} KiB{by}"} | found
            finally:
                pair.close()
                buffer.close()


def _move_pieces(
    pair: Pair, buffer: DeviceBuffer, n_pages: int, n_pieces: int, nbytes: int, pace: Pace
) -> Iterator[tuple[str, Figure]]:
    """Yield how fast pages come into the buffer, every other piece of it, and how fast they are published."""
    total = n_pages * n_pieces * nbytes
    source = np.random.default_rng(2).integers(0, 256, (n_pages, n_pieces * nbytes), np.uint8)
    pair.owner.register_memory(source)
    pair.reader.register_memory(buffer.array)
    # piece j of page i lies in layer j, as in an engine's caches
    layers = np.arange(n_pieces, dtype=np.int64) * n_pages * 2 * nbytes
    slots = np.arange(n_pages, dtype=np.int64) * 2 * nbytes
    places = np.empty((n_pages, n_pieces, 2), np.int64)
    places[..., 0] = buffer.address + slots[:, None] + layers[None, :]
    places[..., 1] = nbytes
    pieces = Pieces(places)
    keys = [f"pieces {nbytes} {i}" for i in range(n_pages)]
    if not pair.owner.publish(keys, source, timeout=30.0).all():
        yield "published", {"problem": f"{n_pages} pages were not all published"}
        return
    own = [f"own {key}" for key in keys]
    copy = buffer.copier(total)
    began = time.monotonic()
    fetches: list[float] = []
    publishes: list[float] = []
    copies: list[float] = []
    n_rounds = _MOST
    while len(copies) < n_rounds + _WARMING:
        outcomes = _timed(fetches, lambda: pair.reader.fetch(keys, pieces, timeout=30.0))
        if not outcomes.all():
            yield "fetched", {"problem": f"{np.count_nonzero(outcomes == 0)} of {n_pages} pages were missed"}
            return
        if len(fetches) == 1:
            there = buffer.read().reshape(n_pieces, n_pages, 2, nbytes)[:, :, 0].transpose(1, 0, 2)
            if not np.array_equal(there.reshape(n_pages, -1), source):
                yield "fetched", {"problem": f"wrong bytes in {n_pages} pages"}
                return
        outcomes = _timed(publishes, lambda: pair.reader.publish(own, pieces, timeout=30.0))
        if not outcomes.all():
            yield "published", {"problem": f"{np.count_nonzero(outcomes == 0)} pages were not published"}
            return
        pair.reader.retract(own)
        _timed(copies, copy)
        if len(copies) == 1:
            n_rounds = pace.rounds(time.monotonic() - began, total)
    yield "fetched over shm", _compared(total, fetches[_WARMING:], copies[_WARMING:])
    yield "published", _compared(total, publishes[_WARMING:], copies[_WARMING:])


def measure_fetches(kind: str, seconds: float) -> Iterator[Figure]:
    """Fetch pages over shm into device memory, beside a copy of as many page-locked bytes, in turns."""
    pace = Pace(seconds, len(_PAGES))
    for nbytes, n_pages in amounts(_PAGES, kind):
        figure: Figure = {
            "n": n_pages,
            "nbytes": nbytes,
            "what": "fetched over shm, beside a copy of page-locked memory",
        }
        if why := pace.why_not(n_pages * nbytes):
            yield figure | {"left_out": why}
            continue
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
            # of room for the pages, and staging for two rounds of them
            pair = Pair(Path(folder), transports=["shm"], pool_size=2 * nbytes * n_pages, **settings_of(kind))
            buffer = KINDS[kind](nbytes * n_pages)
            try:
                yield figure | _fetch(pair.owner, pair.reader, buffer, n_pages, nbytes, pace)
            finally:
                pair.close()
                buffer.close()


def _fetch(owner: Node, reader: Node, buffer: DeviceBuffer, n_pages: int, nbytes: int, pace: Pace) -> Figure:
    source = np.random.default_rng(1).integers(0, 256, (n_pages, nbytes), np.uint8)
    owner.register_memory(source)
    reader.register_memory(buffer.array)
    keys = [f"{nbytes}-{i}" for i in range(n_pages)]
    total = n_pages * nbytes
    began = time.monotonic()
    if not owner.publish(keys, source, timeout=30.0).all():
        return {"problem": f"{n_pages} pages of {nbytes} bytes were not all published"}
    copy = buffer.copier(total)
    fetches: list[float] = []
    copies: list[float] = []
    n_rounds = _MOST
    while len(copies) < n_rounds + _WARMING:
        outcomes = _timed(fetches, lambda: reader.fetch(keys, buffer.rows(n_pages, nbytes), timeout=30.0))
        if not outcomes.all():
            return {
                "problem": f"{np.count_nonzero(outcomes == 0)} of {n_pages} pages of {nbytes} bytes were missed"
            }
        if len(fetches) == 1 and not np.array_equal(buffer.read().reshape(n_pages, nbytes), source):
            return {"problem": f"wrong bytes in {n_pages} pages of {nbytes}"}
        _timed(copies, copy)
        if len(copies) == 1:
            n_rounds = pace.rounds(time.monotonic() - began, total)
    return _compared(total, fetches[_WARMING:], copies[_WARMING:])


def measure_attached(kind: str, seconds: float) -> Iterator[Figure]:
    """Publish pages from device memory through a host's node, and in nodes, in turns with a copy of as many bytes.

    A node whose pool engines look into stages what it publishes; one by itself has the device write into its pool.
    """
    cases = _PAGES[:2]
    pace = Pace(seconds, len(cases))
    for nbytes, n_pages in amounts(cases, kind):
        figure: Figure = {"n": n_pages, "nbytes": nbytes}
        total = nbytes * n_pages
        if why := pace.why_not(total):
            yield figure | {"what": "published attached", "left_out": why}
            continue
        with tempfile.TemporaryDirectory(prefix="p2pkv-evidence-") as folder:
            pair = Pair(
                Path(folder), attached=True, transports=["shm"], pool_size=4 * total, **settings_of(kind)
            )
            buffer = KINDS[kind](total)
            try:
                for way, found in _publish_in_turns(pair, buffer, n_pages, nbytes, pace):
                    yield figure | {"what": f"published {way}, beside a copy of page-locked memory"} | found
            finally:
                pair.close()
                buffer.close()


def _publish_in_turns(
    pair: Pair, buffer: DeviceBuffer, n_pages: int, nbytes: int, pace: Pace
) -> Iterator[tuple[str, Figure]]:
    source = np.random.default_rng(3).integers(0, 256, (n_pages, nbytes), np.uint8)
    ways = {"attached": pair.owner, "in process, staged": pair.host, "in process, straight": pair.reader}
    for node in ways.values():
        node.register_memory(buffer.array)
    copy = buffer.copier(source.nbytes)
    copy()
    buffer.write(source)
    back = np.zeros_like(source)
    pair.reader.register_memory(back)
    took: dict[str, list[float]] = {way: [] for way in ways}
    copies: list[float] = []
    began, n_rounds = time.monotonic(), _MOST
    while len(copies) < n_rounds + _WARMING:
        for way, node in ways.items():
            keys = [f"{way} {i}" for i in range(n_pages)]
            outcomes = _timed(
                took[way],
                lambda node=node, keys=keys: node.publish(keys, buffer.rows(n_pages, nbytes), timeout=30.0),
            )
            if not outcomes.all():
                yield way, {"problem": f"{np.count_nonzero(outcomes == 0)} pages were not published"}
                return
            if not copies:
                back[:] = 0
                if not pair.reader.fetch(keys, back, timeout=30.0).all() or not np.array_equal(back, source):
                    yield way, {"problem": f"{n_pages} pages are not as they were published"}
                    return
            (pair.host if node is pair.owner else node).retract(keys)
        _timed(copies, copy)
        buffer.write(source)
        if len(copies) == 1:
            n_rounds = pace.rounds(time.monotonic() - began, source.nbytes)
    for way, seconds in took.items():
        yield way, _compared(source.nbytes, seconds[_WARMING:], copies[_WARMING:])


def _timed(times: list[float], call: Callable[[], T]) -> T:
    """Add how long a call takes, and return what it returned."""
    before = time.monotonic()
    result = call()
    times.append(time.monotonic() - before)
    return result


def _compared(nbytes: int, ours: list[float], copies: list[float]) -> Figure:
    return {
        "rounds": len(ours),
        "GB_s": round(nbytes / median(ours) / 1e9, 2),
        "copy_GB_s": round(nbytes / median(copies) / 1e9, 2),
        "ratio": round(median(copies) / median(ours), 3),
    }


def measure_rows(kind: str, seconds: float) -> Iterator[Figure]:
    """Put rows of one process's device memory into another's, beside a copy within the device."""
    rows = amounts(_ROWS, kind)
    until = time.monotonic() + seconds
    # as other processes map what cudaMalloc gives: by a handle
    ways = (["shm"], ["cuda_ipc", "shm"])
    for i, transports in enumerate(ways):
        with Cluster(
            transports=transports, device_staging_size="64MiB", buffer_size=0, **settings_of(kind)
        ) as cluster:
            memory = max(n * nbytes for nbytes, n in rows)
            options: dict[str, Any] = {"device": kind, "memory": memory, "in_memfd": True}
            producer = cluster.start("producer", readable=True, **options)
            consumer = cluster.start("consumer", **options)
            cluster.meet(producer, consumer)
            pace = Pace((until - time.monotonic()) / (len(ways) - i), len(_ROWS))
            for nbytes, n in rows:
                figure: Figure = {
                    "n": n,
                    "nbytes": nbytes,
                    "what": f"put over {transports[0]}, beside a copy within the device",
                }
                if why := pace.why_not(n * nbytes):
                    yield figure | {"left_out": why}
                else:
                    yield figure | _put(producer, consumer, n, nbytes, pace)


def _put(producer: NodeProcess, consumer: NodeProcess, n: int, nbytes: int, pace: Pace) -> Figure:
    began = time.monotonic()
    _put_rounds(producer, consumer, n, nbytes, 1)
    n_rounds = pace.rounds(time.monotonic() - began, n * nbytes)
    puts = _put_rounds(producer, consumer, n, nbytes, n_rounds)
    copies = producer.call("copy_times", patience=60.0, n=n, nbytes=nbytes, rounds=n_rounds)
    found = consumer.call("wait", request="round 0", timeout=10.0, seed=1, nbytes=nbytes)
    if found["statuses"] != ["OK"] or found["wrong"]:
        return {"problem": f"of {n} rows of {nbytes} bytes: {found}"}
    direct = consumer.call("counters")["p2pkv_direct_bytes_total"]
    return _compared(n * nbytes, puts, copies) | {"went_directly": direct > 0}


def _put_rounds(
    producer: NodeProcess, consumer: NodeProcess, n: int, nbytes: int, rounds: int
) -> list[float]:
    sizes: dict[str, Any] = {"n": n, "nbytes": nbytes}
    for i in range(rounds):
        consumer.call("grant", request=f"round {i}", timeout=60.0, **sizes)
    times: list[float] = producer.call("put_times", to="consumer", patience=60.0, rounds=rounds, **sizes)
    # A put is over for the producer first, and a request that is still granted can't be granted once more.
    for i in range(rounds):
        found = consumer.call("wait", request=f"round {i}", timeout=10.0)
        assert found["statuses"] == ["OK"], found
    return times


MEASURES: Mapping[str, Measure] = {
    "pages": measure_pages,
    "attached": measure_attached,
    "rows": measure_rows,
    "hunt-shm": hunts_over("shm"),
    "hunt-tcp": hunts_over("tcp"),
    "hunt-kernel": hunts_over("shm", LENT[-1]),
    "hunt-rows": hunt_between_devices,
}


def main() -> None:
    """Print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(MEASURES))
    parser.add_argument("--kind", default="emulated", choices=list(KINDS), help="of device memory")
    parser.add_argument("--seconds", type=float, default=40.0, help="for all figures together")
    options = parser.parse_args()
    for figure in MEASURES[options.what](options.kind, options.seconds):
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
