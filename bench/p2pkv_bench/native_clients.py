"""How many keys a second one shard answers to clients that are never in Python while they ask.

Keys are hashed and batches made up before; each thread asks for batch after batch over a channel of its own, in one
native call each. Beside the rate stands what bounds it: how busy the shard's one thread and the clients were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from p2pkv import _native
from p2pkv.cache.call_limit import LimitedCache
from p2pkv.control.wire import MAX_ENTRIES, Kind
from p2pkv.directory.asking import Lines
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.routes import Route
from p2pkv.node import Node
from p2pkv.page import LOCATION, RESIDENT, Keys
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import timed_together
from p2pkv_bench.rows import MIB, Row, Target, make_row

_ENTRIES = 1 << 17
_BATCH = 1024
_THREADS = (1, 2, 4)
_PATIENCE_S = 10.0
_SHARD_THREAD = "p2pkv-directory"


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure one, two and four clients of one process, in turns."""
    with Pair(meeting, plan.transports[0], 8 * MIB) as pair:
        batches = _published(pair.node)
        clients = [_Client(pair.node, batches) for _ in range(max(_THREADS))]
        figures: dict[int, list[_Figure]] = {n: [] for n in _THREADS}
        for number in range(plan.rounds + 1):
            plan.tell(f"load: native clients, round {number}")
            for n in _THREADS:
                figure = _ask(pair.owner.pid, clients[:n], plan.load_seconds / len(_THREADS))
                figures[n] += [figure] if number > 0 else []
        for client in clients:
            client.close()
    for n, each in figures.items():
        target = Target(20.0) if n == max(_THREADS) else None
        for case, unit, values in (
            ("keys asked for, 1,024 a call, native clients", "M/s", [figure.rate for figure in each]),
            ("the shard's thread meanwhile", "of a core", [figure.shard for figure in each]),
            ("the clients meanwhile", "of a core", [figure.clients for figure in each]),
        ):
            is_judged = unit == "M/s"
            yield make_row(
                {"p2pkv": values},
                suite="load",
                case=case,
                unit=unit,
                batch=_BATCH,
                threads=n,
                target=target if is_judged else None,
            )


@dataclass(frozen=True, slots=True)
class _Figure:
    rate: float
    shard: float
    clients: float


def _directory_of(node: Node) -> DirectoryClient:
    cache = node._cache
    assert not isinstance(cache, LimitedCache), "the nodes of this benchmark are no tenants'"
    return cache._directory


def _published(node: Node) -> list[Keys]:
    """Put entries of made-up pages of ``node`` at the other node's shard; return their keys by batches."""
    directory = _directory_of(node)
    keys = np.random.default_rng(1).integers(0, 256, (3 * _ENTRIES, 16), np.uint8)
    is_others = np.array(_native.AskBatch(keys, None, directory._routes.now.table).waiting(), bool)
    keys = np.ascontiguousarray(keys[is_others][:_ENTRIES])
    if len(keys) < _ENTRIES:
        raise BenchError("the other node's share of the ring is too small")
    locations = np.zeros(len(keys), LOCATION)
    locations["owner"] = directory._own_key
    locations["boot"] = next(m.boot_epoch for m in node.members() if m.node_id == node.node_id)
    locations["offset"] = np.arange(len(keys)) << 18
    locations["length"] = 1 << 18
    locations["word_offset"] = np.arange(len(keys)) << 9
    locations["generation"] = (1 << 62) + 2 * np.arange(len(keys))
    locations["checksum"] = np.random.default_rng(2).integers(0, 1 << 63, len(keys), np.uint64)
    locations["flags"] = RESIDENT
    for first in range(0, len(keys), MAX_ENTRIES):
        part = slice(first, first + MAX_ENTRIES)
        if not directory.put(keys[part], locations[part], time.monotonic() + _PATIENCE_S).all():
            raise BenchError("the entries to look up were not taken")
    return [keys[first : first + _BATCH] for first in range(0, len(keys), _BATCH)]


class _Client:
    """What one thread asks with: a channel, and memory for the answers."""

    def __init__(self, node: Node, batches: list[Keys]) -> None:
        self._owners = _directory_of(node)._owners
        self._route: Route = _directory_of(node)._routes.now
        self._batches = batches
        self._found = np.zeros(_BATCH, np.uint8)
        self._locations = np.zeros((_BATCH, LOCATION.itemsize), np.uint8)
        self._lines = self._borrow()

    def _borrow(self) -> Lines:
        owners = self._batch(0).owners()
        until = time.monotonic() + _PATIENCE_S
        while (lines := self._owners.borrow(self._route, owners)).others:
            # it is being opened, by a thread of the node's
            if time.monotonic() > until:
                raise BenchError("the shard lets no channel in")
            time.sleep(0.01)
        return lines

    def _batch(self, index: int) -> _native.AskBatch:
        return _native.AskBatch(self._batches[index], None, self._route.table, in_turn=True)

    def ask(self, seconds: float, answered: list[int]) -> None:
        """Ask for so long; ``answered`` gets the number of keys."""
        n, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            index = n % len(self._batches)
            self._found[:] = 0
            self._batch(index).ask(
                Kind.GET,
                self._batches[index],
                self._lines.owners,
                self._lines.channels,
                self._found,
                self._locations,
                _PATIENCE_S,
                _PATIENCE_S,
            )
            if not self._found.all():
                raise BenchError("entries that are there were not found")
            n += 1
        answered.append(n * _BATCH)

    def close(self) -> None:
        self._owners.give_back(self._lines, [True] * len(self._lines.channels))


def _ask(shard_pid: int, clients: list[_Client], seconds: float) -> _Figure:
    answered: list[int] = []
    shard, own = _thread_seconds(shard_pid, _SHARD_THREAD), time.process_time()
    took = timed_together([[partial(client.ask, seconds, answered)] for client in clients])
    return _Figure(
        sum(answered) / took / 1e6,
        (_thread_seconds(shard_pid, _SHARD_THREAD) - shard) / took,
        (time.process_time() - own) / took,
    )


def _thread_seconds(pid: int, name: str) -> float:
    """Return what the threads of a process that have this name have used of the processors so far."""
    ticks = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        head, _, tail = stat.read_text().rpartition(")")
        if head.partition("(")[2] == name[:15]:
            user, system = tail.split()[11:13]
            ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")
