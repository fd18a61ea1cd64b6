"""Pages that devices copy from where they lie: in the own pool, and in those of peers whose memory this process maps.

And those that they write to where they are to lie, in the own pool. The memory is page-locked where it is used
(native/src/cuda/lockable.h), and what a device has copied is proven as everywhere: a fetch loads the page's generation
when the copy has ended, and a publish takes the checksum then, and lets the page be seen. So no byte is copied in host
memory, and a page comes as fast as the device reads or writes. Nobody is asked for anything: what can't be had like
this goes through the staging.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.memory.staging import DeviceMemory, Staging
from p2pkv.metrics import Metrics
from p2pkv.page import Outcomes
from p2pkv.pool import Pool, Published


class DeviceCall(Protocol):
    """A call for pages of devices, and what it goes by."""

    call: PageCall
    staging: Staging
    devices: list[_native.CudaDevice]
    index_of: NDArray[np.int32]


class DirectPages:
    """Thread-safe."""

    def __init__(
        self, sources: _native.FetchSources, devices: DeviceMemory, most_locked: int, metrics: Metrics
    ) -> None:
        """``most_locked``: bytes of mapped memory that this process may have page-locked, for all its nodes."""
        self._sources = sources
        self._devices = devices
        self._most_locked = most_locked
        self._metrics = metrics

    def fetch(self, wanted: DeviceCall, deadline: float) -> Outcomes:
        """Return which pages came; the others are no misses yet. A device's failure is reported.

        Some of a page that its owner has replaced meanwhile may be left in the memory of the device.
        """
        call = wanted.call
        landing = _native.CudaLanding(wanted.devices, wanted.index_of, call.pieces, self._most_locked)
        # Each page has one piece, of which only the length counts: nothing is written there.
        pieces = np.empty((len(call.ids), 1, 2), np.int64)
        pieces[:, 0, 0] = wanted.staging.native.address
        pieces[:, 0, 1] = call.lengths
        batch = _native.FetchBatch(call.ids, pieces, np.zeros((len(call.ids), 1), np.int32))
        batch.take_with(landing)
        self._sources.gather_taken(batch, wanted.staging.table.native, deadline - time.monotonic())
        if landing.failure:
            self._devices.report(landing.failure, wanted.devices)
        outcomes: Outcomes = batch.outcomes()
        self._metrics.count(
            self._metrics.device_direct_bytes, "to_device", int(call.lengths[outcomes == 1].sum())
        )
        return outcomes

    def publish(self, given: DeviceCall, pool: Pool, deadline: float) -> Published:
        """Have devices write pages into the own pool; those that are ``NOT_TRIED`` may yet come another way.

        A device's failure is reported.
        """
        call = given.call
        # What is locked stays so: without the other half for peers' pools, own blocks would have all of it in the end.
        most_locked = self._most_locked // 2
        lifting = _native.CudaLifting(given.devices, given.index_of, call.pieces, most_locked)
        published = pool.publish(call.ids, call.pieces, max(0.0, deadline - time.monotonic()), lifting)
        if lifting.failure:
            self._devices.report(lifting.failure, given.devices)
        self._metrics.count(self._metrics.device_direct_bytes, "to_host", published.nbytes)
        return published
