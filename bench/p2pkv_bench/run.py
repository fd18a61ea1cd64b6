"""A whole run, suite after suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from p2pkv_bench import (
    attached,
    compression,
    copies,
    disk,
    exists,
    fabric,
    fetch,
    hot,
    indexer,
    lives,
    native_clients,
    news,
    overhead,
    processes,
    publish,
    rails,
    ring,
    room,
    scrape,
    shard,
    spread,
    starting,
    threads,
    transfers,
    transports,
    validation,
)
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row

_SUITES: Mapping[str, Callable[[Meeting, Plan], Iterator[Row]]] = {
    "fetch": fetch.rows,
    "publish": publish.rows,
    "exists": exists.rows,
    "gil": exists.rows_with_busy_owner,
    "validation": validation.rows,
    "overhead": overhead.rows,
    "load": lambda meeting, plan: chain(
        shard.rows_under_load(meeting, plan), native_clients.rows(meeting, plan)
    ),
    "memory": shard.memory_rows,
    "threads": threads.rows,
    "copies": copies.rows,
    "transports": transports.rows,
    "disk": disk.rows,
    "compression": compression.rows,
    "transfers": transfers.rows,
    "room": room.rows,
    "start": starting.rows,
    "scrape": scrape.rows,
    "indexer": indexer.rows,
    "rails": rails.rows,
    "attach": attached.rows,
    "ring": ring.rows,
    "hot": hot.rows,
    "spread": spread.rows,
    "processes": processes.rows,
    "lives": lives.rows,
    "fabric": fabric.rows,
    "news": news.rows,
}


def measure(plan: Plan) -> Iterator[Row]:
    """Yield each row as soon as it is known; a wrong byte is a :class:`~p2pkv_bench.errors.BenchError`."""
    for name in plan.suites:
        with Meeting() as meeting:
            yield from _SUITES[name](meeting, plan)
