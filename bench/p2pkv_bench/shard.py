"""One shard asked by many at once, and what it needs to remember a million pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

import numpy as np

from p2pkv import _native
from p2pkv.control.wire import MAX_ENTRIES, PUT_ENTRY
from p2pkv_bench.load import LOOK_UP_KEYS, PUBLISH_PAGES
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile
from p2pkv_bench.rows import MIB, Row, make_row

_PROCESSES = 8
_THREADS_EACH = 8
_OWNER = "shard"
_ENTRIES = 1_000_000


def rows_under_load(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure 64 client threads in 8 processes, beside one client alone."""
    plan.tell(f"load: {_PROCESSES} processes start")
    with ExitStack() as undo:
        owner = undo.enter_context(Peer())
        owner.call("start", config=meeting.settings(_OWNER, pool_size=16 * MIB), working_set=0)
        clients = [undo.enter_context(Peer()) for _ in range(_PROCESSES)]
        for number, client in enumerate(clients):
            settings = meeting.settings(f"client-{number}", pool_size=16 * MIB)
            client.send("start", config=settings, working_set=0)
        for client in clients:
            client.answer()
        for peer in (owner, *clients):
            peer.call("wait_for", n_members=_PROCESSES + 1)
        figures: dict[int, dict[str, list[float]]] = {}
        for name, who, n_threads in (("one client", clients[:1], 1), ("64 clients", clients, _THREADS_EACH)):
            for client in who:
                client.send("prepare_load", shard=_OWNER, n_threads=n_threads)
            for client in who:
                client.answer()
            plan.tell(f"load: {name}")
            for client in who:
                client.send("load", seconds=plan.load_seconds)
            answers = [client.answer() for client in who]
            merged: dict[str, list[float]] = {
                kind: list(chain.from_iterable(answer[kind] for answer in answers))
                for kind in ("look_ups", "publishes")
            }
            figures[len(who) * n_threads] = merged
    for threads, calls in figures.items():
        yield from _rows(threads, calls, plan.load_seconds)


def _rows(threads: int, calls: dict[str, list[float]], seconds: float) -> Iterator[Row]:
    n_keys = LOOK_UP_KEYS * len(calls["look_ups"]) + 2 * PUBLISH_PAGES * len(calls["publishes"])
    figures = [("keys asked, put and dropped", "M/s", n_keys / seconds / 1e6)]
    for kind, n in (("look_ups", LOOK_UP_KEYS), ("publishes", PUBLISH_PAGES)):
        for percent in (50, 99):
            case = f"{kind.replace('_', '-')} of {n}, p{percent}"
            figures.append((case, "us", percentile(calls[kind] or [0.0], percent) * 1e6))
    for case, unit, value in figures:
        yield make_row({"p2pkv": [value]}, suite="load", case=case, unit=unit, threads=threads)


def memory_rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Fill a shard with a million entries and ask what it takes."""
    plan.tell("memory: a million entries")
    shard = _native.Shard(1 << 22)
    shard.set_view([1], [1])
    random = np.random.default_rng(1)
    for first in range(0, _ENTRIES, MAX_ENTRIES):
        n = min(MAX_ENTRIES, _ENTRIES - first)
        entries = np.zeros(n, PUT_ENTRY)
        entries["key"] = random.integers(0, 256, (n, 16), np.uint8)
        entries["sequence"] = 1
        entries["location"]["owner"] = 1
        entries["location"]["boot"] = 1
        entries["location"]["length"] = 4096
        entries["location"]["generation"] = 2
        shard.put(entries.view(np.uint8).reshape(n, -1))
    stats = shard.stats()
    value = stats["nbytes"] / max(1, stats["entries"])
    yield make_row(
        {"p2pkv": [value]},
        suite="memory",
        case=f"shard of {stats['entries']:,} entries, an entry",
        unit="bytes",
    )
