"""The store of the disk tier: pages in, pages out, a batch a call.

It keeps two promises for whoever builds on it. **A hit is exactly the bytes that were written under that key**:
every read checks magic, version, key, namespace, length and checksum, and what fails any of them is dropped,
counted and a miss. **No call waits longer than it was told to**: a disk that is full, read-only, broken, slow
or gone makes the store refuse writes and miss reads until the cause is gone, which it finds out by itself.

This module names things and describes shapes; the work is native (``native/src/disk/``), without the GIL.
Everything here is thread-safe. ``docs/disk.md`` has the format on disk, and what each ``fsync`` loses.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.config import DISK_COMPRESSION, DISK_FSYNC, DISK_LAYOUTS
from p2pkv.errors import ConfigError
from p2pkv.page import Keys

logger = logging.getLogger(__name__)

Pages = NDArray[np.int64]
"""``(n, 2)``: address and length of each page; bytes."""

Flags = NDArray[np.uint8]
"""``(n,)``: 1 where it is so, else 0."""

LAYOUTS = DISK_LAYOUTS
FSYNC = DISK_FSYNC
EVICTION = ("oldest", "least_recently_read")
"""What goes first when room is needed."""


DEFAULT_CLUSTER = "p2pkv"
"""Whose store it is that doesn't say so. Mirrors ``kDefaultCluster`` in ``native/src/disk/options.h``."""


class UnusableDiskError(ConfigError):
    """The folder can't be used now, but nothing says that it is not this node's: a full or broken disk."""


class DiskInUseError(ConfigError):
    """Another process has the folder open."""


class ReadStatus(IntEnum):
    """What became of one page of a read. Only a ``HIT`` says anything about the destination's bytes."""

    MISS = 0
    """Not there, a bad record, or the disk failed: the counters tell which."""
    HIT = 1
    OTHER_LENGTH = 2
    """There, but not as long as its destination; nothing was read."""
    TIMED_OUT = 3


def refusal(path: str, *, layout: str, node_id: str, namespace: str, cluster: str) -> ConfigError | None:
    """Return what a :class:`DiskStore` would raise for this folder, but for one in use; nothing is changed there."""
    reason = _native.disk_folder_refusal(
        path, node_id=node_id, name_space=namespace, cluster=cluster, layout=LAYOUTS.index(layout)
    )
    return _error_of(reason) if reason else None


def _error_of(reason: str) -> ConfigError:
    # the core says "cannot" of what the system refused, and what is wrong of anything else
    kind: type[ConfigError] = ConfigError
    if reason.startswith(("cannot ", "no memory")):
        kind = UnusableDiskError
    elif " is in use by process " in reason:
        kind = DiskInUseError
    return kind(f"cannot open the disk tier: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """How a store works. Raises :class:`~p2pkv.errors.ConfigError` for what no store can have."""

    capacity: int
    """Bytes of the folder with everything in it; never exceeded."""
    layout: str = "bucket"
    fsync: str = "seal"
    eviction: str = "oldest"
    compression: str = "off"
    """``zstd``: pages that become smaller by an eighth at least are written so. Both kinds can be read."""
    allow_uring: bool = True
    """Use io_uring where the kernel allows it; else blocking calls on threads."""
    allow_direct: bool = True
    """Go around the page cache where the file system allows it."""
    bucket_size: int | None = None
    """Bytes of a segment; None: a 32nd of the capacity, 1 MiB at least and 512 MiB at most."""
    queue_size: int = 64 << 20
    """Bytes of pages that may wait to be written; what is above is refused."""
    read_buffer: int = 32 << 20
    """Bytes of reads under way. Pages above half of it are refused."""
    retry_seconds: float = 1.0
    """Between attempts to come back after an error; doubled up to 30 s."""
    stall_seconds: float = 2.0
    """While a read is older than this, others miss at once instead of queueing behind it."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("layout", LAYOUTS),
            ("fsync", FSYNC),
            ("eviction", EVICTION),
            ("compression", DISK_COMPRESSION),
        ):
            if getattr(self, name) not in choices:
                listed = ", ".join(choices)
                raise ConfigError(f"disk {name} must be one of {listed}, not {getattr(self, name)!r}")
        for name in ("capacity", "queue_size", "read_buffer"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"disk {name} must be positive, not {getattr(self, name)}")
        if self.compression == "zstd" and (missing := _native.zstd_missing()):
            raise ConfigError(f"disk compression with zstd is not possible: {missing}")


class DiskStore:
    """A folder of pages that belongs to one node of a cluster and one namespace, open in one process at a time."""

    def __init__(
        self,
        path: str,
        options: DiskOptions,
        *,
        node_id: str,
        namespace: str,
        cluster: str = DEFAULT_CLUSTER,
        faults: _native.FaultyFiles | None = None,
        store_id: int = 0,
        verify: bool = True,
        changes: _native.ChangeLog | None = None,
    ) -> None:
        """Open it, or make it. ``ConfigError`` says why not: in use, another node's or cluster's, another version.

        :class:`UnusableDiskError` if it is the disk that is in the way.

        What an earlier run left is found in the background (:meth:`drain_recovered`, :attr:`is_recovered`).
        ``faults`` breaks the file system on purpose, ``store_id`` makes its bytes reproducible, and without
        ``verify`` reads believe everything: for tests. ``changes`` is told of each page that comes or goes.
        """
        try:
            self._native = _native.DiskStore(
                path,
                node_id=node_id,
                name_space=namespace,
                cluster=cluster,
                capacity=options.capacity,
                layout=LAYOUTS.index(options.layout),
                fsync=FSYNC.index(options.fsync),
                eviction=EVICTION.index(options.eviction),
                allow_uring=options.allow_uring,
                allow_direct=options.allow_direct,
                bucket_size=options.bucket_size or 0,
                queue_size=options.queue_size,
                read_buffer=options.read_buffer,
                compression=DISK_COMPRESSION.index(options.compression),
                retry_seconds=options.retry_seconds,
                stall_seconds=options.stall_seconds,
                store_id=store_id,
                verify=verify,
                faults=faults,
                changes=changes,
            )
        except ValueError as error:
            raise _error_of(str(error)) from error
        self._trouble = ""

    @property
    def native(self) -> _native.DiskStore:
        """The native store, for the tier."""
        return self._native

    @property
    def io(self) -> str:
        """How bytes get to the disk: ``io_uring`` or ``threads``."""
        return self._native.io

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is gone around."""
        return self._native.is_direct

    @property
    def is_recovered(self) -> bool:
        """Whether all that an earlier run left has been found."""
        return self._native.is_recovered

    def write(
        self, keys: Keys, pages: Pages, checksums: NDArray[np.uint64], tickets: NDArray[np.uint64]
    ) -> Flags:
        """Queue pages; never waits. Returns which were accepted.

        The memory of an accepted page must stay until its ticket comes out of :meth:`drain_released`. A page
        whose bytes don't have its checksum any more by then is not written.
        """
        return self._native.write(keys, pages, checksums, tickets)

    def drain_released(self, limit: int, timeout: float) -> NDArray[np.uint64]:
        """Take tickets of pages whose memory is no longer needed, each exactly once; waits for one at most."""
        return self._native.drain_released(limit, timeout)

    def contains(self, keys: Keys) -> Flags:
        """Say which pages are there; nothing is read."""
        return self._native.contains(keys)

    def read(self, keys: Keys, pages: Pages, timeout: float) -> NDArray[np.uint8]:
        """Read pages into local memory; returns ``(n,)`` of :class:`ReadStatus` within ``timeout`` seconds.

        When it has returned nothing writes to the memory any more, however slow the disk is.
        """
        return self._native.read(keys, pages, timeout)

    def list(self, cursor: int, limit: int) -> tuple[Keys, int]:
        """List at most ``limit`` keys from ``cursor`` on (0: all), and the next cursor (0: that was all)."""
        return self._native.list(cursor, limit)

    def drain_dropped(self, limit: int, timeout: float) -> Keys:
        """Take keys of pages that are not here any more; waits at most ``timeout`` seconds for one."""
        self.check_health()
        return self._native.drain_dropped(limit, timeout)

    def drain_recovered(
        self, limit: int, timeout: float
    ) -> tuple[Keys, NDArray[np.uint64], NDArray[np.uint64]]:
        """Take pages that an earlier run left: keys, lengths and checksums; waits at most ``timeout`` seconds."""
        return self._native.drain_recovered(limit, timeout)

    def check_health(self) -> str:
        """Return what keeps the disk from being used, or an empty text; log each change once."""
        is_suspended, is_unreadable, reason = self._native.health()
        trouble = reason if is_suspended or is_unreadable else ""
        if trouble and not self._trouble:
            what = "reads miss and writes are refused" if is_unreadable else "writes are refused"
            logger.warning("disk tier suspended, %s until it works again: %s", what, trouble)
        elif self._trouble and not trouble:
            logger.info("disk tier works again")
        self._trouble = trouble
        return trouble

    def stats(self) -> dict[str, int]:
        """Count what is there (``capacity``, ``used``, ``pages``, ``queued_bytes``) and what happened.

        ``stored_bytes`` are of pages, ``written_bytes`` the same as they are on disk.
        ``used`` is an upper bound of what the folder occupies. ``stored``, ``known`` (there already),
        ``refused`` (queue full, suspended, too large), ``changed`` (bytes without their checksum), ``lost``
        (accepted, then an error), ``evicted``, ``hit``, ``missed``, ``timed_out`` and ``recovered`` are pages;
        ``bad_records``, ``read_errors``, ``write_errors``, ``suspensions``, ``removed_orphans`` say for
        themselves; ``lost_keys`` were not handed out because nobody drained.
        """
        return self._native.stats()

    def flush(self, timeout: float) -> bool:
        """Wait until what was accepted is written, and forced to the device unless ``fsync`` is never."""
        return self._native.flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued, seal, and let go of the folder. Idempotent.

        False if the disk hangs: then the folder stays locked for as long as the process lives.
        """
        return self._native.close(timeout)
