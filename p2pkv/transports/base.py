"""The transport interface: how one node reads registered memory of another.

Data moves by pull only. An owner registers memory as readable; a reader opens an :class:`Endpoint`, exchanges
``describe()`` blobs with the owner over the control plane, attaches the owner's region and reads spans of it.
No transport ever grants remote write.

Rules every transport keeps (``p2pkv.testing.transport_contract`` checks them):

* methods are thread-safe, and only ``wait`` and ``close`` block on the peer;
* after ``wait`` has returned, local memory is the caller's again, time-outs included;
* a dead peer is ``PEER_LOST`` on its endpoint only; an endpoint that timed out or lost its peer is done for;
* ``close`` is idempotent, closes children, and settles what is pending as ``CANCELED``;
* a span out of range is refused before posting and harms only itself;
* nothing that was not registered readable can be read, and nothing can be written;
* a span is ``OK`` only if its generation word, **loaded after the span's last byte was**, has the expected
  value.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.transports.options import UNSET, TransportOptions

if TYPE_CHECKING:
    from typing_extensions import Self

Options = TypeVar("Options", bound=TransportOptions)

Spans = NDArray[np.int64]
"""``(n, 3)``: local offset, remote offset, length; bytes."""

Words = NDArray[np.uint64]
"""``(n, 2)``: the remote offset of the span's generation word, or :data:`NO_WORD`, and its expected value."""

Statuses = NDArray[np.uint8]
"""``(n,)`` of :class:`Status`."""

_LOOK_S = 0.0002
"""Between two looks at a transfer that can't be slept for."""

NO_WORD = np.uint64(2**64 - 1)
"""As a word's offset: this span is read unvalidated."""


class Status(IntEnum):
    """What became of one span of a batched read."""

    OK = 0
    PENDING = 1
    OUT_OF_RANGE = 2
    REJECTED = 3
    CANCELED = 4
    PEER_LOST = 5
    TIMED_OUT = 6


class Resource(ABC):
    """Something that is closed when no longer needed; usable in a ``with`` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release it and everything opened from it. Idempotent; may be called while others use it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@runtime_checkable
class FdBacked(Protocol):
    """Memory that other processes of this host can map, as ``p2pkv.SharedRegion`` is."""

    @property
    def fd(self) -> int: ...


class MemoryRegion(Resource):
    """Memory this process registered with a transport. From ``close`` on, no peer reads it."""

    address: int
    nbytes: int

    @abstractmethod
    def describe(self) -> bytes:
        """Return what a peer hands to :meth:`Endpoint.attach`.

        Raises :class:`~p2pkv.errors.TransportError` if the region was not registered readable.
        """


class RemoteRegion(ABC):
    """A peer's readable region, as one endpoint sees it. Lives as long as its endpoint."""

    nbytes: int


class Transfer(ABC):
    """A batch of reads on its way."""

    @abstractmethod
    def done(self) -> bool:
        """Make what progress is possible without blocking; true once every span has settled."""

    def advance(self, timeout: float) -> bool:
        """Make progress for at most ``timeout`` seconds; true once every span has settled.

        What is pending then goes on, unlike after :meth:`wait`. Override it where the thread can sleep until
        something comes.
        """
        until = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True

    @abstractmethod
    def wait(self, timeout: float) -> Statuses:
        """Block until every span has settled, at most ``timeout`` seconds.

        Spans still pending then become ``TIMED_OUT`` and the endpoint is dead: open a new one. The local
        memory is the caller's again. Repeated calls return the same statuses.
        """


class Endpoint(Resource):
    """One peer over one transport. It reads one batch at a time."""

    @abstractmethod
    def describe(self) -> bytes:
        """Return this end's half of the handshake."""

    @abstractmethod
    def bind(self, remote: bytes) -> None:
        """Take the peer's half of the handshake. Never blocks on it: what is wrong there shows in reads.

        Raises :class:`~p2pkv.errors.TransportError` for a blob that no end of this transport could have
        written.
        """

    @abstractmethod
    def attach(self, region: bytes) -> RemoteRegion:
        """Make a peer's region readable through this endpoint. Never blocks on the peer.

        Raises :class:`~p2pkv.errors.TransportError` for a malformed blob.
        """

    @abstractmethod
    def read(
        self, local: MemoryRegion, remote: RemoteRegion, spans: Spans, *, words: Words | None
    ) -> Transfer:
        """Start reading ``spans`` of ``remote`` into ``local``.

        With ``words``, one per span, a span is ``OK`` only if its word had the expected value after the last
        byte was read. ``None`` reads unvalidated: for memory that nobody reuses, and for tests. The local
        memory belongs to the transfer until :meth:`Transfer.wait` has returned; a transfer that is dropped
        before that is canceled, and its endpoint is done for. While one transfer is pending, another settles
        as ``CANCELED`` at once. Raises :class:`~p2pkv.errors.UsageError` for arrays of the wrong shape or
        dtype, and for regions that are not this transport's and this endpoint's.
        """


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What a node tells the transports that it starts."""

    host: str = "127.0.0.1"
    """The address that the node binds."""
    advertise: str = "127.0.0.1"
    """The address at which peers reach it."""
    ports: tuple[int, int] = (0, 0)
    """First and last of the ports that a transport may listen on; 0: any that is free."""
    registered_nbytes: int = 0
    """What the node is going to register of its own: the pool, and what transfers receive into."""
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The setting ``transport_options``: for each transport the options that were set."""

    def options_of(self, name: str, kind: type[Options]) -> Options:
        """Return the options of the transport ``name``; those that were not set have their defaults.

        Raises :class:`~p2pkv.errors.ConfigError` for one that is not there or can't be so.
        """
        return kind.parse(name, self.options.get(name, UNSET))


@dataclass(frozen=True, slots=True)
class Remark:
    """A line of ``p2pkv doctor`` about what a transport finds on this machine."""

    what: str
    says: str
    advice: str = ""
    """What to do about it; empty where all is well."""


@dataclass(frozen=True, slots=True)
class RailTotals:
    """What became of reads over one of a transport's rails, of all peers together; the metrics show it."""

    nbytes: int
    """Bytes that came over it."""
    failures: Mapping[str, int]
    """By reason: streams that broke, or were given up because others were heard, or quicker."""
    retried_nbytes: int
    """Bytes asked for over it that were asked for again over another one."""


class Transport(Resource):
    """One way for nodes to read each other's memory."""

    name: ClassVar[str]
    domain: str
    """Two ends can connect if and only if their domains are equal."""
    options_class: ClassVar[type[TransportOptions]] = TransportOptions
    """What ``transport_options`` may say of it."""
    locks_memory: ClassVar[bool] = False
    """Whether what is registered is locked in memory, so that RLIMIT_MEMLOCK bounds it."""
    confines_peers: ClassVar[bool] = True
    """Whether a peer that was let in reaches this end's own regions only, and no other memory of the process."""

    @classmethod
    @abstractmethod
    def unavailable(cls, options: Mapping[str, object] = UNSET) -> str | None:
        """Return None, or one sentence saying what is missing on this machine, with these options set.

        Raises :class:`~p2pkv.errors.ConfigError` for options that it does not have.
        """

    @classmethod
    def untried(cls, settings: TransportSettings) -> str | None:
        """Return None, or one sentence saying why a process can't read from itself over it, though nothing be wrong."""
        return None

    @classmethod
    def create(cls, settings: TransportSettings) -> Self:
        """Start the transport for a node; its own options are ``settings.options_of(cls.name, ...)``."""
        return cls()

    @classmethod
    def remarks(cls, settings: TransportSettings) -> Iterable[Remark]:
        """Return what ``p2pkv doctor`` should tell of it, beside whether it can run and its options."""
        return ()

    @abstractmethod
    def register_memory(self, buffer: object, address: int, nbytes: int, *, readable: bool) -> MemoryRegion:
        """Make ``nbytes`` at ``address`` usable as the local side of reads and, if ``readable``, by peers.

        ``buffer`` owns the memory and is kept alive until the region is closed. Raises
        :class:`~p2pkv.errors.TransportError` when this transport can't use the memory that way.
        """

    @abstractmethod
    def open(self) -> Endpoint:
        """Open an endpoint, not yet bound to a peer."""

    @abstractmethod
    def accept(self, remote: bytes) -> bytes:
        """Answer a reader's handshake: open an endpoint, bind it to ``remote`` and return its own half.

        The transport keeps what is needed of it until the peer is gone or the transport is closed. Raises
        :class:`~p2pkv.errors.TransportError` for a blob that no end of this transport could have written.
        """

    def rail_totals(self) -> Sequence[RailTotals]:
        """Return what became of reads over each rail, by its number; empty for a transport that has none."""
        return ()

    def refusal(self) -> str:
        """Return why memory of a peer was out of reach the last time, as the log has it."""
        return "this machine can't map it"

    def n_forged(self) -> int:
        """Return how many encrypted connections were ended for bytes that the other end had not sent so."""
        return 0

    @property
    def native(self) -> Any | None:
        """The object that accepts readers without the interpreter, or None for a transport in Python."""
        return None


def check_batch(spans: Spans, words: Words | None) -> tuple[Spans, Words | None]:
    """Return the arrays of a read, contiguous, or raise UsageError; for :meth:`Endpoint.read`."""
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 3:
        raise UsageError(f"spans must be an (n, 3) int64 array, not {spans.shape} {spans.dtype}")
    spans = np.ascontiguousarray(spans)
    if words is None:
        return spans, None
    if words.dtype != np.uint64 or words.shape != (len(spans), 2):
        raise UsageError(f"words must be a ({len(spans)}, 2) uint64 array, not {words.shape} {words.dtype}")
    return spans, np.ascontiguousarray(words)


def screen_spans(spans: Spans, words: Words | None, *, local_nbytes: int, remote_nbytes: int) -> Statuses:
    """Return ``PENDING`` for each span that may be posted and ``OUT_OF_RANGE`` for the others."""
    local, remote, length = spans[:, 0], spans[:, 1], spans[:, 2]
    fits = (local >= 0) & (remote >= 0) & (length >= 0)
    # Compared as room left, which can't overflow as a sum could.
    fits &= (length <= local_nbytes - np.maximum(local, 0)) & (
        length <= remote_nbytes - np.maximum(remote, 0)
    )
    if words is not None:
        at = words[:, 0]
        has_room = remote_nbytes >= 8
        fits &= (at == NO_WORD) | (
            (at % np.uint64(8) == 0) & (at <= np.uint64(max(remote_nbytes - 8, 0))) & has_room
        )
    statuses: Statuses = np.where(fits, np.uint8(Status.PENDING), np.uint8(Status.OUT_OF_RANGE))
    return statuses
