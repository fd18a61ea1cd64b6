"""The published pool: committed pages in a shared region that peers read without asking.

A node copies each page it publishes into its pool and forgets about readers. The pool makes room by itself:
what was used longest ago is evicted, and readers notice, because every page has a *generation word* that
turns odd before its block is reused and even only when the next page is complete. So a location may be as old
as it likes: it leads to the bytes that were published, or to a miss.

This module names things and describes shapes; the work is native (``native/src/pool/pool.cc``), a whole batch a
call, without the GIL. Everything here is thread-safe, and only :meth:`Pool.drain_evicted` waits for anything.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.config import COMPRESSION
from p2pkv.errors import ConfigError
from p2pkv.page import Keys, Locations, as_locations

Pieces = NDArray[np.int64]
"""``(n, p, 2)``: address and length of each of a page's pieces; bytes. The page is their concatenation."""

Mask = NDArray[np.uint8]
"""``(n,)``: 1 where it is so, else 0."""

_NO_LIMIT = (1 << 64) - 1


class PoolStatus(IntEnum):
    """What became of one page of a publish."""

    STORED = 0
    EXISTS = 1
    """The key was there already, or another thread was faster. The page there now has the same length."""
    NO_ROOM = 2
    """All other blocks are reserved or held. The back of a batch gets it: readers need the front first."""
    TOO_LARGE = 3
    """Larger than the pool: it can never be stored here."""
    OTHER_LENGTH = 4
    """The key is there with another length: two kinds of pages share a namespace."""
    NOT_TRIED = 5
    """Another page of the batch is there with another length, and nothing was stored; or a device did not bring it."""
    TIMED_OUT = 6
    """The deadline had passed when its turn to be copied came."""
    CHANGED = 7
    """Its bytes changed while it was packed; nothing is kept of it."""


class Published(NamedTuple):
    """What became of the pages of a publish."""

    statuses: NDArray[np.uint8]
    """``(n,)`` of :class:`PoolStatus`."""
    locations: Locations
    """Of those that can be read now (``STORED``, ``EXISTS``) or that have another length; zeros for the others."""
    n_readable: int
    nbytes: int
    """Of pages that were stored."""


class FetchStatus(IntEnum):
    """What became of one page of a fetch. Only of a ``HIT`` the memory holds what it should."""

    MISS = 0
    HIT = 1
    OTHER_LENGTH = 2
    """The page is not as long as the pieces given for it."""
    TIMED_OUT = 3
    """The deadline had passed when its turn to be copied came."""
    UNREADABLE = 4
    """The page lies there packed, and can't be unpacked."""


class Pool:
    """A pool of ``nbytes`` of pages in a sealed memfd, laid out ``[generation words | data]``.

    A page takes its bytes rounded up to the granule; where pages of more than 64 sizes are there at once, those of
    further sizes up to a sixteenth more. ``owner``, ``boot``, ``region`` and ``has_disk`` go into every location.
    Pins hold at most ``pinned_limit`` bytes of blocks (default: half of the pool). The memory lives until
    :meth:`release_memory`, or until the last reference is gone.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        owner: int,
        boot: int,
        region: int = 0,
        has_disk: bool = False,
        granule: int = 4096,
        pinned_limit: int | None = None,
        evictions_kept: int = 65536,
        huge_page: int = 0,
        prefault_behind: bool = False,
        compression: str = "off",
        changes: _native.ChangeLog | None = None,
        is_kept: bool = False,
        is_shown: bool = False,
        left: tuple[int, int] | None = None,
        lock: _native.WriterLock | None = None,
    ) -> None:
        """Allocate, prefault and seal the memory: up to 0.6 s a GiB. ``ConfigError`` if it is not to be had.

        With huge pages of ``huge_page`` bytes, pages and words share ``nbytes`` rounded up to whole ones. With
        ``prefault_behind`` the memory is touched after this has returned, and a shortage ends the process.
        ``compression`` is that of the configuration. ``changes`` is told of each page that comes or goes.

        The memory of a pool that ``is_kept`` can be gone on with by another process that has the descriptors :attr:`fd`
        and ``native.records_fd``: it gives them as ``left``, which stay the caller's, with the ``lock`` of the second,
        which becomes the pool's. ``ConfigError`` says why what was left can't be used; then nothing was changed.
        Of one that ``is_shown`` other processes of this host find pages by themselves.
        """
        try:
            # for the parts of the core that use it directly
            self.native = _native.Pool(
                nbytes,
                granule=granule,
                owner=owner,
                boot=boot,
                region=region,
                has_disk=has_disk,
                pinned_limit=pinned_limit or 0,
                evictions_kept=evictions_kept,
                huge_page=huge_page,
                prefault_behind=prefault_behind,
                packing=COMPRESSION.index(compression),
                changes=changes,
                is_kept=is_kept,
                is_shown=is_shown,
                left=left,
                lock=lock,
            )
        except ValueError as error:
            raise ConfigError(f"cannot make a pool: {error}") from error
        self.largest_page: int = self.native.data_nbytes
        """The longest page that fits when the pool is empty; bytes."""

    def set_boot(self, boot: int) -> None:
        """Have locations name this boot of the owner from now on."""
        self.native.set_boot(boot)

    @property
    def address(self) -> int:
        """Where the region is mapped in this process; register it readable with each transport."""
        return self.native.address

    @property
    def nbytes(self) -> int:
        """Size of the region: words, padding and data."""
        return self.native.nbytes

    @property
    def fd(self) -> int:
        """The memfd; the pool's own, don't close it."""
        return self.native.fd

    @property
    def granule(self) -> int:
        """What every block is a multiple of; bytes."""
        return self.native.granule

    @property
    def words_offset(self) -> int:
        """Where the table of generation words begins in the region: one 64-bit word a granule."""
        return self.native.words_offset

    @property
    def data_offset(self) -> int:
        """Where the first granule begins in the region."""
        return self.native.data_offset

    @property
    def takes_given(self) -> bool:
        """Whether devices may write into it: not if it is kept for a successor, shown to engines, or packed."""
        return self.native.takes_given

    def block_nbytes(self, lengths: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return how many bytes of the pool pages of these lengths take; of lengths that can't be right, very many."""
        bounded = np.minimum(lengths, np.uint64(1 << 40)).astype(np.int64)
        return np.asarray(-(-bounded // self.granule) * self.granule, np.int64)

    def publish(
        self,
        keys: Keys,
        pieces: Pieces,
        timeout: float = math.inf,
        lifting: _native.CudaLifting | None = None,
    ) -> Published:
        """Copy in the pages that are not there yet, evicting what was used longest ago.

        Nothing is stored if one of them is there with another length. The keys of a batch must differ. The pieces'
        memory is read during the call only. What is not copied within ``timeout`` seconds is left out.

        With a ``lifting`` the pieces lie on its devices, which write them into the pool: one that
        :attr:`takes_given`. What they could not write is ``NOT_TRIED``.
        """
        statuses, locations, n_readable, nbytes = self.native.publish(keys, pieces, timeout, lifting)
        return Published(statuses, as_locations(locations), n_readable, nbytes)

    def fetch(self, keys: Keys, pieces: Pieces) -> NDArray[np.uint8]:
        """Copy pages of this pool into local memory; returns ``(n,)`` of :class:`FetchStatus`."""
        return self.native.fetch(keys, pieces)

    def lookup(self, keys: Keys) -> tuple[Mask, Locations]:
        """Say which pages are there, and where. Doesn't count as a use of them."""
        found, locations = self.native.lookup(keys)
        return found, as_locations(locations)

    def pin(
        self, keys: Keys, lease_seconds: float, most_bytes: int = _NO_LIMIT
    ) -> tuple[Mask, NDArray[np.uint64], Locations]:
        """Keep pages in place until :meth:`unpin`, at most ``lease_seconds``.

        Returns which could be pinned (it is there, and within ``pinned_limit`` and, in this call, ``most_bytes``),
        their ``(n,)`` tickets (0: none) and where they are. A pinned page can be retracted, but its bytes stay.
        """
        found, tickets, locations = self.native.pin(keys, lease_seconds, most_bytes)
        return found, tickets, as_locations(locations)

    def pinned_nbytes(self, tickets: NDArray[np.uint64]) -> int:
        """Return the bytes of the blocks that these pins hold, which for packed pages are fewer than their lengths."""
        return self.native.pinned_nbytes(tickets)

    def unpin(self, tickets: NDArray[np.uint64]) -> Mask:
        """Give pins back; 1 where the pin held until now.

        Where it did not, what was read under it counts for nothing. A ticket is good once: repeated, expired
        or zero, it does nothing.
        """
        return self.native.unpin(tickets)

    def retract(self, keys: Keys) -> tuple[Mask, Locations]:
        """Take pages out; returns which were there, and where, for the directory's compare-and-delete."""
        found, locations = self.native.retract(keys)
        return found, as_locations(locations)

    def purge(self) -> int:
        """Take out all pages; returns their number. They pass through :meth:`drain_evicted` too."""
        return self.native.purge()

    def list(self, cursor: int, limit: int) -> tuple[Keys, Locations, int]:
        """List at most ``limit`` pages from ``cursor`` on (0: all), and the next cursor (0: that was all).

        Pages that stay throughout are listed exactly once, whatever else comes and goes between the calls.
        """
        keys, locations, following = self.native.list(cursor, limit)
        return keys, as_locations(locations), following

    def drain_evicted(self, limit: int, timeout: float, *, gather: float = 0.0) -> tuple[Keys, Locations]:
        """Take the oldest records of evicted pages: their keys and where they were.

        Waits at most ``timeout`` seconds while there are none and nobody calls :meth:`wake_drainer`, and then
        ``gather`` seconds for more. Beyond
        ``evictions_kept`` records the oldest are dropped, counted in ``stats()["dropped_evictions"]``.
        """
        keys, locations = self.native.drain_evicted(limit, timeout, gather)
        return keys, as_locations(locations)

    def stats(self) -> dict[str, int]:
        """Count what is there and what happened.

        ``capacity``, ``used`` and ``pinned_bytes`` are bytes, ``pages`` those there now; ``stored_pages``,
        ``evicted_pages``, ``no_room_pages`` and ``dropped_evictions`` only grow.
        """
        return self.native.stats()

    def wake_drainer(self) -> None:
        """Have one who waits in :meth:`drain_evicted`, or comes next, go on without evictions: there is other news."""
        self.native.wake_drainer()

    def close(self) -> None:
        """Wake whoever waits in :meth:`drain_evicted`; from now on it returns at once. Idempotent."""
        self.native.close()

    def leave_memory(self) -> bool:
        """As :meth:`release_memory`, but leave the pages where they are to a successor. Of a pool that is kept."""
        return self.native.leave_memory()

    def release_memory(self) -> bool:
        """Take all pages out and give the memory back, whoever still holds this object. Idempotent.

        Nothing is found or stored from then on. Nobody may read through a transport or under a pin any more; while a
        call is copying, the memory stays until the last reference is gone, and this returns false.
        """
        return self.native.release_memory()
