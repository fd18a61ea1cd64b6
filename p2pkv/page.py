"""Values of the data path: keys, locations and outcomes, one numpy row a page."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.arrays.host import HostArray, SupportsCudaArray
from p2pkv.errors import UsageError

KEY_BYTES = 16

Keys = NDArray[np.uint8]
"""``(n, 16)``: hashed page keys (see :func:`hash_keys`)."""

LOCATION = np.dtype(
    [
        ("owner", "<u8"),  # node key: the first 8 bytes of BLAKE2b of the node id
        ("boot", "<u8"),  # boot epoch of the owner
        ("offset", "<u8"),  # of the page in the owner's region
        ("length", "<u8"),
        ("word_offset", "<u8"),  # of the page's generation word in the owner's region
        ("generation", "<u8"),  # what that word holds while the page is there; even
        ("checksum", "<u8"),
        ("region", "<u4"),
        ("flags", "<u4"),
    ]
)
"""Where a page lies: 64 bytes, the same in Python, C++ and on the wire."""

Locations = NDArray[np.void]
"""``(n,)`` of :data:`LOCATION`."""


def as_locations(raw: NDArray[np.uint8]) -> Locations:
    """View native ``(n, 64)`` bytes as ``(n,)`` locations, without a copy."""
    return raw.reshape(-1).view(LOCATION)


def as_bytes(locations: Locations) -> NDArray[np.uint8]:
    """View ``(n,)`` locations as the ``(n, 64)`` bytes that native calls take."""
    return np.ascontiguousarray(locations).view(np.uint8).reshape(-1, LOCATION.itemsize)


ANY_GENERATION = (1 << 64) - 1
"""Of an entry that its owner has taken out wherever it says that the page lies. Mirrors ``kAnyGeneration``."""

RESIDENT = 1
"""Flag of a location: the page is in the owner's pool."""

HAS_DISK = 2
"""Flag of a location: its owner has a disk tier, and is asked for the page when it is not in the pool any more."""


class Outcome(IntEnum):
    """What became of one page of a call. Every doubt is a ``MISS``."""

    MISS = 0
    """Not there, not provably right, or not in time. The memory given for it holds anything."""
    HIT = 1
    """Fetched: the bytes are exactly those published. Exists: some live node has it. Published: it can be fetched."""


Outcomes = NDArray[np.uint8]
"""``(n,)`` of :class:`Outcome`, one a page."""


@dataclass(frozen=True, slots=True, eq=False)
class Whereabouts:
    """Where pages are, one entry a page. What is said of a page that is not found means nothing. A hint."""

    outcomes: Outcomes
    """``HIT`` for pages that some live node has."""
    owners: NDArray[np.uint64]
    """The key of a node that has the page; the same for the same node, in this process and in others."""
    is_on_disk: NDArray[np.bool_]
    """Whether it has the page on its disk only."""
    nbytes: NDArray[np.uint64]
    """The page's length; 0 for a page on this node's own disk, of which it is not known without reading."""

    @classmethod
    def nowhere(cls, n: int) -> Whereabouts:
        """Return that none of ``n`` pages is found."""
        return cls(np.zeros(n, np.uint8), np.zeros(n, np.uint64), np.zeros(n, bool), np.zeros(n, np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Where pages lie in local memory when a page is not one contiguous row, such as K and V in arrays of their own.

    ``array`` is ``(n, p, 2)`` int64: of each of ``p`` pieces of each of ``n`` pages the absolute address and the
    length in bytes. A page is its pieces one after another; every page of a batch has the same number of them. The
    memory must be registered and stay so for the whole call; pieces to fetch into must not overlap.
    """

    array: NDArray[np.int64]

    def __post_init__(self) -> None:
        array = self.array
        if not isinstance(array, np.ndarray):
            raise UsageError(f"pieces must be (n, p, 2) int64, not {type(array).__name__}")
        if array.ndim != 3 or array.shape[2] != 2 or array.shape[1] == 0 or array.dtype != np.int64:
            raise UsageError(f"pieces must be (n, p, 2) int64, not {array.shape} {array.dtype}")
        object.__setattr__(self, "array", np.ascontiguousarray(array))

    @classmethod
    def of_rows(cls, array: NDArray[Any]) -> Pieces:
        """Take each row ``array[i]`` as page ``i`` of one piece. Rows must be C-contiguous."""
        return cls(row_pieces(array))


Pages: TypeAlias = "Pieces | HostArray | SupportsCudaArray"
"""Pages for a call: pieces, or an array whose rows are pages."""


def row_pieces(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the array of :meth:`Pieces.of_rows`."""
    flags = array.flags
    if array.ndim < 1 or not (flags.c_contiguous or array[:1].flags.c_contiguous):
        raise UsageError(f"an array of pages needs C-contiguous rows; this has strides {array.strides}")
    n_pages = len(array)
    address: int = array.__array_interface__["data"][0]  # an eighth of the time of ``array.ctypes``
    return _native.row_pieces(address, array.strides[0], array.nbytes // n_pages if n_pages else 0, n_pages)


_EARLIER_EPOCHS = 8
"""So many are remembered, for who asks what became of a page."""


class Namespace:
    """Hashes the keys of one namespace, as its epoch is at that moment. Thread-safe.

    A key is 16 bytes of BLAKE2b over a prefix and the key's text; the prefix is the digest of the namespace's name,
    salted with its epoch. So whoever knows of a bump finds nothing that was published before it.
    """

    def __init__(self, name: str, epochs: _native.NamespaceEpochs | None = None) -> None:
        """``epochs``: what is known of the epochs of all namespaces; without them there was never a bump."""
        self.name = name
        self._scopes = scopes(name)
        self._epochs = epochs or _native.NamespaceEpochs()
        self._known = (0, 0, name_digest(name))  # the version of the epochs, this namespace's, and the prefix
        self.earlier_epochs: tuple[int, ...] = ()
        """Those that keys were hashed in before the one of now, of late, the youngest first."""

    def hash(self, keys: Sequence[str | bytes]) -> Keys:
        """Return the ``(n, 16)`` uint8 hashes of ``keys``. Raises :class:`UsageError` for other types."""
        return self.hash_in_epoch(keys)[1]

    def hash_in_epoch(self, keys: Sequence[str | bytes]) -> tuple[int, Keys]:
        """Return the epoch that ``keys`` were hashed with, and their hashes as :meth:`hash` does."""
        if isinstance(keys, (str, bytes)) or not isinstance(keys, (Sequence, np.ndarray)):
            raise UsageError(f"keys must be a sequence of str or bytes, not {type(keys).__name__}")
        known = self._known
        if self._epochs.version != known[0]:
            known = self._know()
        _, epoch, prefix = known
        try:
            hashed: Keys | None = _native.hash_keys(prefix, keys)
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(f"keys must be a sequence of str or bytes: {error}") from error
        if hashed is None:  # a libzmq without libsodium
            raw = b"".join(_hash_slowly(prefix, key) for key in keys)
            hashed = np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)
        return epoch, hashed

    @property
    def prefix(self) -> bytes:
        """What keys are hashed with now."""
        known = self._known
        return known[2] if self._epochs.version == known[0] else self._know()[2]

    @property
    def epoch(self) -> int:
        """What keys are hashed in now."""
        known = self._known
        return known[1] if self._epochs.version == known[0] else self._know()[1]

    def _know(self) -> tuple[int, int, bytes]:
        # the version before the epoch: who raises it meanwhile is noticed by the next call
        version = self._epochs.version
        epoch = self._epochs.greatest(self._scopes)
        before = self._known[1]
        if before != epoch and before not in self.earlier_epochs:
            self.earlier_epochs = (before, *self.earlier_epochs)[:_EARLIER_EPOCHS]
        self._known = known = (version, epoch, name_digest(self.name, epoch))
        return known


def name_digest(name: str, epoch: int = 0) -> bytes:
    """Return the 16 bytes that a namespace is known by, and that its keys in ``epoch`` are hashed with."""
    salt = epoch.to_bytes(16, "little")  # zeros are no salt
    return hashlib.blake2b(name.encode(), digest_size=KEY_BYTES, salt=salt).digest()


def page_key(namespace: str, name: str | bytes, epoch: int = 0) -> bytes:
    """Return the 16 bytes by which nodes know the page that is published as ``name`` in ``namespace``.

    That is what KV events carry. ``epoch`` is the namespace's (:attr:`p2pkv.Node.epoch`), 0 before its first bump.
    """
    return _hash_slowly(name_digest(namespace, epoch), name)


def scopes(name: str) -> list[bytes]:
    """Return the digests of all namespaces that this one is a part of, itself included.

    They are what stands before each of its spaces: integrations put what makes KV differ behind the name that they were
    given.
    """
    words = name.split(" ")
    return [name_digest(" ".join(words[: i + 1])) for i in range(len(words))]


def _hash_slowly(prefix: bytes, key: str | bytes) -> bytes:
    data = key.encode() if isinstance(key, str) else key
    return hashlib.blake2b(prefix + data, digest_size=KEY_BYTES).digest()
