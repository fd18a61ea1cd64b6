"""The disk tier: what it costs a publish, how fast it brings pages back, and how soon after a restart.

The folder lies where temporary files do (``TMPDIR``). The reference for reading is a plain reader of a file there,
with O_DIRECT and 4 MiB a call; on a file system without O_DIRECT that one reads from the page cache, and so may we.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv.node import Node
from p2pkv_bench import disk_compression, publish, references
from p2pkv_bench.errors import BenchError
from p2pkv_bench.keys import keys_at
from p2pkv_bench.pair import OWNER, Pair
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Contestant, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row
from p2pkv_bench.working_set import Rotation, checksums

_DISK = "disk"
_SMALL_POOL = 64 * MIB
_READ_NBYTES = 4 * MIB
_QUEUED = "p2pkv_disk_queued_bytes"
_PLAIN = "plain O_DIRECT reader"


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure every case of the plan over its first transport."""
    with Pair(meeting, plan.transports[0], plan.working_set, reader_pool=publish.POOL_NBYTES) as pair:
        yield from _publish_rows(pair, plan, meeting.folder)
        yield from _fetch_rows(pair, plan, meeting)
    yield from disk_compression.rows(plan, meeting.folder)


def _disk(folder: Path, plan: Plan) -> dict[str, object]:
    return {"disk_path": str(folder), "disk_size": 4 * plan.working_set + 256 * MIB}


def _publish_rows(pair: Pair, plan: Plan, folder: Path) -> Iterator[Row]:
    with pair.reader(_DISK, (), pool_size=publish.POOL_NBYTES, disk=_disk(folder / "write", plan)) as node:
        for page_nbytes in plan.pages:
            for batch in plan.batches:
                if page_nbytes * batch <= publish.ROUND_NBYTES:
                    plan.tell(f"disk, publish, {page_nbytes // KIB} KiB, {batch} a call")
                    yield _publish_row(pair, plan, node, page_nbytes, batch)


def _publish_row(pair: Pair, plan: Plan, node: Node, page_nbytes: int, batch: int) -> Row:
    with_disk = publish.Case(pair, plan, page_nbytes, batch, 1, node=node)
    without = publish.Case(pair, plan, page_nbytes, batch, 1)
    with_disk.fill()
    without.fill()
    is_judged = page_nbytes >= 64 * KIB and batch >= 32
    return make_row(
        take_turns(
            {
                "p2pkv": with_disk.publish,
                "no disk tier": without.publish,
                references.MEMCPY: partial(without.copy, is_chosen=False),
            },
            plan.rounds,
        ),
        suite="disk",
        case="publish into a full pool",
        unit="GB/s",
        page_nbytes=page_nbytes,
        batch=batch,
        target=Target(0.5, references.MEMCPY) if is_judged else None,
    )


def _fetch_rows(pair: Pair, plan: Plan, meeting: Meeting) -> Iterator[Row]:
    for page_nbytes in plan.pages:
        if page_nbytes < 16 * KIB:
            continue  # what small pages cost is seen in the store's figures
        with ExitStack() as undo:
            plan.tell(f"disk, fetch, {page_nbytes // KIB} KiB")
            case = _Fetches(pair, plan, meeting, page_nbytes, undo)
            for batch in plan.batches:
                if batch > 1 and page_nbytes * batch <= _SMALL_POOL // 2:
                    yield from case.rows(batch)
            yield case.restart_row()


class _Fetches:
    """A data set of four times the pool or more, on the disk of a node here and of one in another process."""

    def __init__(self, pair: Pair, plan: Plan, meeting: Meeting, page_nbytes: int, undo: ExitStack) -> None:
        self._pair = pair
        self._plan = plan
        self._page_nbytes = page_nbytes
        self._folder = meeting.folder / f"read-{page_nbytes}"
        self._folder.mkdir()
        settings = {"pool_size": _SMALL_POOL, "transports": [pair.transport]}
        self._peer = undo.enter_context(Peer())
        remote = settings | _disk(self._folder / "remote", plan)
        self._peer.call("start", config=meeting.settings("far-disk", **remote), working_set=plan.working_set)
        self._start = partial(
            pair.reader, "near-disk", (), pool_size=_SMALL_POOL, disk=_disk(self._folder / "local", plan)
        )
        self._node = self._start()
        undo.callback(self._close_node)
        self._peer.call("wait_for", n_members=4)
        self._pages = pair.source.pages(page_nbytes)
        self._expected = pair.source.checksums(page_nbytes)
        self._slots = pair.destination.slots(page_nbytes)
        self._rotation = Rotation(len(self._pages))
        self._slot_rotation = Rotation(len(self._slots))
        self._local = keys_at(pair.node, OWNER, f"local-{page_nbytes}", len(self._pages))
        self._remote = keys_at(pair.node, OWNER, f"remote-{page_nbytes}", len(self._pages))
        self._publish_all()
        self._plain = _PlainReader(self._folder / "plain", pair.source.array)
        undo.callback(self._plain.close)

    def _close_node(self) -> None:
        self._node.close()

    def _publish_all(self) -> None:
        self._peer.send(
            "publish",
            page_nbytes=self._page_nbytes,
            prefix=f"remote-{self._page_nbytes}",
            shard=OWNER,
            is_paced=True,
        )
        step = max(1, 8 * MIB // self._page_nbytes)
        for first in range(0, len(self._local), step):
            part = slice(first, first + step)
            self._node.publish(self._local[part], self._pages[part])
            _settle(self._node)
        if self._peer.answer() != len(self._remote):
            raise BenchError("not all pages were published")

    def rows(self, batch: int) -> Iterator[Row]:
        """Fetch pages that the pool has long evicted: here straight from disk, there by promotion."""
        contestants: dict[str, dict[str, Contestant]] = {
            "fetch of evicted pages, own disk": {
                "p2pkv": partial(self._fetch, self._node, self._local, batch)
            },
            "fetch of evicted pages, a peer's disk": {
                "p2pkv": partial(self._fetch, self._pair.node, self._remote, batch)
            },
        }
        for case, ours in contestants.items():
            yield make_row(
                take_turns(
                    ours | {_PLAIN: partial(self._plain.read, self._plan.round_nbytes)}, self._plan.rounds
                ),
                suite="disk",
                case=case,
                unit="GB/s",
                transport=self._pair.transport if "peer" in case else "",
                page_nbytes=self._page_nbytes,
                batch=batch,
            )

    def _fetch(self, node: Node, keys: Sequence[str], batch: int) -> float:
        """Fetch a round and verify the bytes of every hit; return GB/s."""
        n_calls = self._plan.n_calls(self._page_nbytes, batch, 1)
        moves = [(self._rotation.take(batch), self._slot_rotation.take(batch)) for _ in range(n_calls)]
        hits = np.zeros((n_calls, batch), bool)
        for _, slot in moves:
            self._slots[slot : slot + batch, :8] = 0  # so that bytes of an earlier round don't pass for right

        def fetch(number: int, page: int, slot: int) -> None:
            rows = self._slots[slot : slot + batch]
            hits[number] = node.fetch(keys[page : page + batch], rows)

        seconds = timed([[partial(fetch, number, *move) for number, move in enumerate(moves)]])
        if hits.sum() < 0.99 * hits.size:
            raise BenchError(f"only {int(hits.sum())} of {hits.size} pages were fetched")
        self._verify(moves, hits)
        return n_calls * batch * self._page_nbytes / seconds / 1e9

    def _verify(self, moves: Sequence[tuple[int, int]], hits: NDArray[np.bool_]) -> None:
        batch = hits.shape[1]
        last_in = np.full(len(self._slots), -1)  # the call whose pages are there now
        for number, (_, slot) in enumerate(moves):
            last_in[slot : slot + batch] = number
        for number, (page, slot) in enumerate(moves):
            rows, expected = self._slots[slot : slot + batch], self._expected[page : page + batch]
            is_judged = hits[number] & (last_in[slot : slot + batch] == number)
            if not np.array_equal(checksums(rows)[is_judged], expected[is_judged]):
                raise BenchError("wrong bytes came from disk")

    def restart_row(self) -> Row:
        """Close the node here and start it again; the seconds until the first page is fetched from its disk."""
        seconds = []
        for _ in range(self._plan.rounds):
            self._node.close()
            began = time.perf_counter()
            self._node = self._start()
            while not self._node.fetch(self._local[:1], self._slots[:1]).all():
                if time.perf_counter() - began > 30:
                    raise BenchError("a restarted node does not find its pages")
            seconds.append(time.perf_counter() - began)
        return make_row(
            {"p2pkv": seconds},
            suite="disk",
            case=f"restart with {len(self._local)} pages, to the first hit",
            unit="s",
            page_nbytes=self._page_nbytes,
        )


def _settle(node: Node) -> None:
    while node.counters()[_QUEUED]:
        time.sleep(0.001)


class _PlainReader:
    """Reads a file of its own from one end to the other, over and over, around the page cache."""

    def __init__(self, path: Path, content: NDArray[np.uint8]) -> None:
        content.tofile(path)
        flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
        try:
            self._fd = os.open(path, flags)
        except OSError:  # a file system in memory
            self._fd = os.open(path, os.O_RDONLY)
        os.fsync(self._fd)
        self._nbytes = content.nbytes
        self._buffer = mmap.mmap(-1, _READ_NBYTES, flags=mmap.MAP_PRIVATE)  # aligned, as O_DIRECT wants it
        self._buffer.madvise(mmap.MADV_HUGEPAGE)  # as the store's own: a disk reads faster into fewer pieces
        self._at = 0

    def read(self, nbytes: int) -> float:
        """Read so many bytes, from where the last call ended; return GB/s."""
        began = time.perf_counter()
        for _ in range(max(1, nbytes // _READ_NBYTES)):
            if os.preadv(self._fd, [self._buffer], self._at) != _READ_NBYTES:
                raise BenchError("the plain reader read too little")
            self._at = (self._at + _READ_NBYTES) % (self._nbytes // _READ_NBYTES * _READ_NBYTES)
        return max(1, nbytes // _READ_NBYTES) * _READ_NBYTES / (time.perf_counter() - began) / 1e9

    def close(self) -> None:
        os.close(self._fd)
        self._buffer.close()
