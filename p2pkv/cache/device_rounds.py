"""Pages of device memory: in rounds through staging, each as if the call had been for that host memory.

Those that lie, or are to lie, in memory which this process maps don't come that way (``device_direct.py``), but the
rest does.

A fetch reads a round's pages into the staging, where they are proven as everywhere, and copies those that were hits to
the device; a publish copies a round's pages into the staging, and the pool takes them from there. So a page is sealed,
and a hit reported, only when the copy has ended; the next round is under way by then. A copy that was begun can't be
called back: the call waits for it, at most that of one round, and no round is begun after the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.cache.device_direct import DirectPages
from p2pkv.cache.staging_room import Round, StagingRoom
from p2pkv.errors import UsageError
from p2pkv.memory.staging import DeviceMemory, Staging
from p2pkv.metrics import Metrics
from p2pkv.page import Outcomes
from p2pkv.pool import Pool, PoolStatus, Published

_LOOK_S = 0.05
"""Between looks whether the node closes, by a call that waits for a stream."""

FetchToHost: TypeAlias = "Callable[[PageCall, float], Outcomes]"
Store: TypeAlias = "Callable[[Round], bool]"
"""Takes the pages of a round from the staging before it returns; says whether another one is of any use."""


class _Waited(IntEnum):
    """What became of waiting for a stream; mirrors ``StreamOutcome``."""

    DONE = 0
    FAILED = 1
    TIMED_OUT = 2


class DevicePages:
    """Thread-safe. Calls wait for each other where the staging has no room for all of them."""

    def __init__(
        self, devices: DeviceMemory, pool: Pool, metrics: Metrics, direct: DirectPages | None
    ) -> None:
        """``direct``: None: all pages go through the staging."""
        self._devices = devices
        self._direct = direct
        self._pool = pool
        self._metrics = metrics

    def fetch(self, call: PageCall, fetch_to_host: FetchToHost, deadline: float) -> Outcomes:
        """Bring pages into device memory; they are there, for kernels launched from now on, when it returns."""
        run = self._start(call, deadline)
        if run.problem is not None:
            self._metrics.count(self._metrics.missed_pages, run.problem, len(call.ids))
            return np.zeros(len(call.ids), np.uint8)
        if self._direct is None:
            return self._fetch_rounds(run, fetch_to_host, deadline)
        outcomes = self._direct.fetch(run, deadline)
        left = np.flatnonzero(outcomes == 0)
        if len(left):
            rest = run if len(left) == len(outcomes) else run.chosen(left)
            outcomes[left] = self._fetch_rounds(rest, fetch_to_host, deadline)
        return outcomes

    def _fetch_rounds(self, run: _Run, fetch_to_host: FetchToHost, deadline: float) -> Outcomes:
        call, n = run.call, len(run.call.ids)
        outcomes = np.zeros(n, np.uint8)
        first = 0
        with ExitStack() as undo:
            room = self._borrow(run, deadline, undo)
            while room is not None and first < n and time.monotonic() < deadline and not run.is_broken:
                if not room.has_halves:
                    self._land(room, outcomes)
                address, nbytes = room.turn()
                rows = slice(first, run.fill(first, nbytes))
                staged = room.call_at(call, rows, address)
                hits = fetch_to_host(staged, deadline)
                self._land(room, outcomes)
                if hits.any():
                    self._begin(room, run, Round(rows, staged, hits), is_to_device=True)
                first = rows.stop
            if room is not None:
                self._land(room, outcomes)
        self._metrics.count(self._metrics.missed_pages, "device" if run.is_broken else "timed_out", n - first)
        return outcomes

    def _land(self, room: StagingRoom, outcomes: Outcomes) -> None:
        """Wait for the round before: its hits count now."""
        ended = room.wait()
        if ended is None:
            return
        round_, is_there = ended
        assert round_.chosen is not None
        if is_there:
            outcomes[round_.rows] = round_.chosen
            self._count_copied(round_, "to_device")
        else:
            self._metrics.count(self._metrics.missed_pages, "device", int(np.count_nonzero(round_.chosen)))

    def publish(self, call: PageCall, deadline: float) -> Published:
        """Copy pages into the pool that are not there yet, the front of the batch last: so it stays if not all can.

        ``NOT_TRIED`` are those that a device did not give, in time or at all.
        """
        known, _ = self._pool.lookup(call.ids)
        wanted = np.flatnonzero(known == 0)
        statuses = np.full(len(call.ids), PoolStatus.EXISTS, np.uint8)
        statuses[wanted] = PoolStatus.NOT_TRIED
        nbytes = 0
        if len(wanted):
            # used just now, or they would be evicted for those that come
            self._pool.native.touch(call.ids[known == 1])
            run = self._start(_chosen(call, wanted), deadline)
            if run.problem is None:
                statuses[wanted], nbytes = self._publish_wanted(run, deadline)
        self._pool.native.touch(call.ids)
        # Of all of them now: what a round stored, a later one of a batch larger than the pool may have evicted.
        there, locations = self._pool.lookup(call.ids)
        statuses[(statuses <= PoolStatus.EXISTS) & (there == 0)] = PoolStatus.NO_ROOM
        n_readable = int(np.count_nonzero(statuses <= PoolStatus.EXISTS))
        return Published(statuses, locations, n_readable, nbytes)

    def _publish_wanted(self, run: _Run, deadline: float) -> tuple[NDArray[np.uint8], int]:
        if self._direct is None or not self._pool.takes_given:
            return self._publish_rounds(run, deadline)
        direct = self._direct.publish(run, self._pool, deadline)
        statuses, nbytes = direct.statuses, direct.nbytes
        if (statuses == PoolStatus.OTHER_LENGTH).any():
            return statuses, nbytes  # the caller says so, and the rest is not to be stored by another way
        statuses[statuses == PoolStatus.TIMED_OUT] = PoolStatus.NOT_TRIED
        left = np.flatnonzero(statuses == PoolStatus.NOT_TRIED)
        if len(left):
            rest = run if len(left) == len(statuses) else run.chosen(left)
            statuses[left], nbytes_staged = self._publish_rounds(rest, deadline)
            nbytes += nbytes_staged
        return statuses, nbytes

    def _publish_rounds(self, run: _Run, deadline: float) -> tuple[NDArray[np.uint8], int]:
        statuses = np.full(len(run.call.ids), PoolStatus.NOT_TRIED, np.uint8)
        nbytes = 0

        def store(round_: Round) -> bool:
            nonlocal nbytes
            staged = round_.staged
            stored = self._pool.publish(staged.ids, staged.pieces, max(0.0, deadline - time.monotonic()))
            is_late = stored.statuses == PoolStatus.TIMED_OUT
            statuses[round_.rows] = np.where(is_late, np.uint8(PoolStatus.NOT_TRIED), stored.statuses)
            nbytes += stored.nbytes
            return True

        self._lift(run, store, deadline)
        return statuses, nbytes

    def lift(self, call: PageCall, rows: NDArray[np.intp], store: Store, deadline: float) -> None:
        """Have some pages of a call stored by who is not the own pool, the front of them last.

        What is not handed to ``store`` a device did not give, in time or at all. ``Round.rows`` are of ``rows``.
        """
        run = self._start(_chosen(call, rows), deadline)
        if run.problem is None:
            self._lift(run, store, deadline)

    def _lift(self, run: _Run, store: Store, deadline: float) -> None:
        last, goes_on = len(run.call.ids), True
        with ExitStack() as undo:
            room = self._borrow(run, deadline, undo)
            is_under_way = room is not None
            while room is not None and is_under_way:
                copied = room.wait()
                if not room.has_halves:
                    goes_on = goes_on and self._store(copied, store)
                if goes_on and last > 0 and time.monotonic() < deadline and not run.is_broken:
                    last = self._begin_from_device(room, run, last)
                is_under_way = room.is_copying
                if room.has_halves:
                    goes_on = goes_on and self._store(copied, store)

    def _store(self, copied: tuple[Round, bool] | None, store: Store) -> bool:
        """Have a round stored from the staging if it is there; return whether there is use in another."""
        if copied is None or not copied[1]:
            return True
        self._count_copied(copied[0], "to_host")
        return store(copied[0])

    def _begin_from_device(self, room: StagingRoom, run: _Run, last: int) -> int:
        """Begin to copy the pages before ``last`` for which there is room; return the first of them."""
        address, nbytes = room.turn()
        rows = slice(run.fill_backwards(last, nbytes), last)
        staged = room.call_at(run.call, rows, address)
        self._begin(room, run, Round(rows, staged, None), is_to_device=False)
        return rows.start

    def _start(self, call: PageCall, deadline: float) -> _Run:
        """Prepare a call: its largest page fits the staging, and its devices have come to where it may begin."""
        assert call.device_of is not None
        staging = self._devices.staging
        largest = int(call.lengths.max())
        if largest > staging.native.largest:
            raise UsageError(
                f"a page of {largest} bytes does not fit the staging of device memory, which takes pages of up to "
                f"{staging.native.largest}; raise device_staging_size"
            )
        ordinals, index = number_devices(call.device_of)
        run = _Run(call, staging, self._devices.devices(ordinals), index)
        if run.is_broken:
            run.problem = "device"
        elif call.stream is not None:
            self._await_stream(run, call.stream, deadline)
        return run

    def _await_stream(self, run: _Run, stream: int, deadline: float) -> None:
        # 0 to 2 are default streams, of which each device has its own; any other is of one device
        devices = run.devices if stream <= 2 else run.devices[:1]
        try:
            marks = [device.mark(stream) for device in devices]  # all of them before the first wait
        except RuntimeError as error:
            run.problem = "device"
            self._devices.report(str(error), run.devices)
            return
        for mark in marks:
            waited, problem = int(_Waited.TIMED_OUT), ""
            while waited == _Waited.TIMED_OUT and not self._devices.is_ending:
                left = deadline - time.monotonic()
                waited, problem = mark.wait(min(max(0.0, left), _LOOK_S))
                if left <= 0:
                    break
            if waited != _Waited.DONE:
                run.problem = "timed_out" if waited == _Waited.TIMED_OUT else "device"
            if waited == _Waited.FAILED:
                self._devices.report(problem, run.devices)

    def _borrow(self, run: _Run, deadline: float, undo: ExitStack) -> StagingRoom | None:
        """Return room for at least the largest page until ``undo``, or None if there is none in time."""
        left = max(0.0, deadline - time.monotonic())
        room = StagingRoom.borrow(run.staging, run.call.lengths, self._devices, left)
        if room is not None:
            undo.callback(room.close)
        return room

    def _begin(self, room: StagingRoom, run: _Run, round_: Round, *, is_to_device: bool) -> None:
        there = run.call.pieces[round_.rows]
        room.begin(run.devices, run.index_of[round_.rows], there, round_, is_to_device=is_to_device)

    def _count_copied(self, round_: Round, direction: str) -> None:
        lengths = round_.staged.lengths
        nbytes = int(lengths.sum() if round_.chosen is None else lengths[round_.chosen == 1].sum())
        self._metrics.count(self._metrics.staged_bytes, direction, nbytes)


class _Run:
    """A call on its way through the staging. ``problem``: why its pages are missed before it begins."""

    def __init__(
        self,
        call: PageCall,
        staging: Staging,
        devices: list[_native.CudaDevice],
        index_of: NDArray[np.int32],
    ) -> None:
        self.call = call
        self.staging = staging
        self.devices = devices
        self.index_of = index_of  # (n, p): index into the devices
        self.problem: str | None = None
        self._ends = np.cumsum(call.lengths)

    def chosen(self, rows: NDArray[np.intp]) -> _Run:
        """Return the same for some of the pages, in this order."""
        return _Run(_chosen(self.call, rows), self.staging, self.devices, self.index_of[rows])

    @property
    def is_broken(self) -> bool:
        """Whether a device of it is lost."""
        return any(device.is_lost for device in self.devices)

    def fill(self, first: int, nbytes: int) -> int:
        """Return the page after the last that finds room, from ``first`` on."""
        begin = int(self._ends[first] - self.call.lengths[first])
        return int(np.searchsorted(self._ends, begin + nbytes, side="right"))

    def fill_backwards(self, last: int, nbytes: int) -> int:
        """Return the first page of those before ``last`` that find room."""
        begins = self._ends - self.call.lengths
        return int(np.searchsorted(begins, int(self._ends[last - 1]) - nbytes, side="left"))


def number_devices(device_of: NDArray[np.int32]) -> tuple[list[int], NDArray[np.int32]]:
    """Return the ordinals that there are, each once, and of each piece the index into them."""
    first = device_of.flat[0]
    if (
        device_of == first
    ).all():  # as nearly always, and sorting thousands of pieces takes longer than to launch them
        return [int(first)], np.zeros(device_of.shape, np.int32)
    ordinals, index = np.unique(device_of, return_inverse=True)
    return ordinals.tolist(), index.reshape(device_of.shape).astype(np.int32)


def _chosen(call: PageCall, rows: NDArray[np.intp]) -> PageCall:
    """Return the call for some of its pages, in this order."""
    assert call.device_of is not None
    return PageCall(
        call.ids[rows],
        call.pieces[rows],
        call.lengths[rows],
        call.memory_of[rows],
        call.table,
        call.device_of[rows],
        call.stream,
    )
