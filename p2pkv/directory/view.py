"""The cluster view: which nodes there are, in which boot, in which state; and its form on the wire.

A :class:`View` never changes. Two nodes that believe the same have the same digest, whatever order they
learnt it in; a peer whose digest differs is asked for its view and handed ours. What comes in from the wire
is checked field by field before anything is built from it. ``docs/membership.md`` describes the format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b

import msgspec

from p2pkv.errors import VersionError, ViewError

VIEW_VERSION = 1
MAX_MEMBERS = 4096
MAX_VIEW_BYTES = 16 << 20  # MAX_MEMBERS records with every field at its limit fit
MAX_ID_BYTES = 128
MAX_ADDRESS_BYTES = 260  # 253 bytes of DNS name, a colon, a port
MAX_TRANSPORTS = 16
MAX_DOMAIN_BYTES = 128
MAX_DOUBTS = 64
MAX_CLUSTER_BYTES = 128
DEFAULT_CLUSTER = "p2pkv"
MAX_WEIGHT = 16.0  # bounds the ring: 2,560 virtual nodes for one member
LAST_EPOCH = 2**63 - 1
"""The greatest boot epoch, and incarnation, that can be told: no clock tells it before the year 2262."""


class State(IntEnum):
    """What is believed about a node; of two beliefs about one incarnation the greater counts."""

    ALIVE = 0
    SUSPECT = 1
    """It did not answer the node whose view this is; still on the ring, but not worth that node's waiting."""
    DEAD = 2
    """It did not answer for long enough. Kept for a while, so that it can learn of it and object."""
    LEFT = 3
    """It said good-bye."""


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one node."""

    node_id: str
    boot_epoch: int
    """Grows with each start of the node: what it held in boots before ``first_boot`` is gone."""
    address: str
    """``host:port`` of its control socket."""
    incarnation: int = 0
    """Grows within a boot, by the node itself alone, each time it objects to being suspected or dead."""
    state: State = State.ALIVE
    transports: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Name to domain: two ends can connect if and only if their domains are equal."""
    weight: float = 1.0
    """Its share of the directory, in those of an ordinary node; 0: it holds no entries."""
    is_draining: bool = False
    """It is about to leave: it hands its pages over, and takes none over from others."""
    kept_since: int = 0
    """The first of its boots in which its pool was the memory that it is now, which outlives its process; 0: it ends
    with that."""

    @property
    def precedence(self) -> tuple[int, int, int, str]:
        """Of two records of one node the one with the greater precedence counts.

        The address decides between two processes that were started under one id in the same nanosecond.
        """
        return (self.boot_epoch, self.incarnation, int(self.state), self.address)

    @property
    def key(self) -> int:
        """The node's :func:`node_key`."""
        return node_key(self.node_id)

    @property
    def condition(self) -> str:
        """The name of its state, or ``DRAINING`` if it is alive and about to leave."""
        return "DRAINING" if self.is_draining and self.state is State.ALIVE else self.state.name

    @property
    def first_boot(self) -> int:
        """The first boot whose pages are still where they were."""
        return self.kept_since or self.boot_epoch

    @property
    def may_come_back(self) -> bool:
        """Whether the node is away, and may come back with its pages where they were."""
        return not self.is_present and self.kept_since > 0 and not self.is_draining

    @property
    def is_present(self) -> bool:
        """Whether the node belongs to the ring: alive, or only suspected not to be."""
        return self.state <= State.SUSPECT


@functools.lru_cache(2 * MAX_MEMBERS)
def node_key(node_id: str) -> int:
    """Return the 64 bits that stand for a node in locations and probes."""
    return int.from_bytes(blake2b(node_id.encode()).digest()[:8], "little")


class View(Mapping[str, Member]):
    """An immutable mapping from node id to :class:`Member`, the dead and departed of late included."""

    __slots__ = ("_by_key", "_members", "_present", "digest")

    digest: int
    """64 bits over id, boot, incarnation and address of those present.

    The dead are left out: nodes forget them at different moments, and must not disagree because of it. A
    death still changes the digest, since the dead node is no longer in it. Suspicion is left out as well: it
    says what one node can reach, and two nodes may differ in that for as long as they like.
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._members: dict[str, Member] = {}
        self._by_key: dict[int, Member] = {}
        self._present: tuple[Member, ...] | None = None  # it is asked for several times a turn, and made once
        self.digest = 0
        for member in members:
            self._put(member)

    def replacing(self, members: Iterable[Member], gone: Iterable[str] = ()) -> View:
        """Return this view with other records of ``members``, and without the ids ``gone``.

        Costs what changed, and a copy of two tables.
        """
        view = View()
        view._members, view._by_key, view.digest = self._members.copy(), self._by_key.copy(), self.digest
        for node_id in gone:
            view._drop(node_id)
        for member in members:
            view._put(member)
        return view

    def _put(self, member: Member) -> None:
        before = self._members.get(member.node_id)
        self._members[member.node_id] = self._by_key[node_key(member.node_id)] = member
        self.digest = (self.digest + _share(member) - _share(before)) % 2**64

    def _drop(self, node_id: str) -> None:
        member = self._members.pop(node_id)
        del self._by_key[node_key(node_id)]
        self.digest = (self.digest - _share(member)) % 2**64

    def __getitem__(self, node_id: str) -> Member:
        return self._members[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        states = ", ".join(f"{m.node_id} {m.state.name.lower()}" for m in self._members.values())
        return f"View({states})"

    def alive(self) -> tuple[Member, ...]:
        """Return the members nobody doubts."""
        return tuple(member for member in self._members.values() if member.state is State.ALIVE)

    def present(self) -> tuple[Member, ...]:
        """Return the members on the ring: the alive and the suspected."""
        if self._present is None:
            self._present = tuple(member for member in self._members.values() if member.is_present)
        return self._present

    def by_key(self, key: int) -> Member | None:
        """Return the member with this :func:`node_key`, in whatever state, or None."""
        return self._by_key.get(key)


def _share(member: Member | None) -> int:
    """Return what a record adds to the digest of its view."""
    if member is None or not member.is_present:
        return 0
    text = "\0".join(
        (
            member.node_id,
            str(member.boot_epoch),
            str(member.incarnation),
            str(int(State.ALIVE)),  # whoever is on the ring counts as alive here
            member.address,
        )
    )
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def flaw(member: Member) -> str | None:
    """Return None, or one sentence saying which limit the record breaks."""
    who = f"node id {member.node_id[:MAX_ID_BYTES]!r}"
    if not _is_text(member.node_id, MAX_ID_BYTES):
        return f"{who} is not 1 to {MAX_ID_BYTES} bytes of printable characters"
    if not _is_address(member.address):
        return f"{who}: address {member.address[:MAX_ADDRESS_BYTES]!r} is not host:port"
    if not 0 <= member.boot_epoch <= LAST_EPOCH or not 0 <= member.incarnation <= LAST_EPOCH:
        return f"{who}: boot epoch or incarnation is not in 0 to 2**63 - 1"
    if not 0 <= member.kept_since <= member.boot_epoch:
        return f"{who}: its pool is kept since boot epoch {member.kept_since}, which is none up to its own"
    if not (math.isfinite(member.weight) and 0 <= member.weight <= MAX_WEIGHT):
        return f"{who}: weight {member.weight} is not 0 to {MAX_WEIGHT:g}"
    if len(member.transports) > MAX_TRANSPORTS:
        return f"{who}: {len(member.transports)} transports, at most {MAX_TRANSPORTS}"
    for text in (*member.transports, *member.transports.values()):
        if not _is_text(text, MAX_DOMAIN_BYTES):
            return (
                f"{who}: a transport or domain is not 1 to {MAX_DOMAIN_BYTES} bytes of printable characters"
            )
    return None


def _is_text(text: str, limit: int) -> bool:
    # the length in characters first: never encode a huge string only to refuse it
    return 0 < len(text) <= limit and text.isprintable() and len(text.encode()) <= limit


def _is_address(address: str) -> bool:
    if not _is_text(address, MAX_ADDRESS_BYTES):
        return False
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536


@dataclass(frozen=True, slots=True)
class Doubt:
    """A question to a witness: whether this boot of a node has answered it since."""

    node_id: str
    boot_epoch: int
    ago_ms: int
    """How long before the message was sent the doubter's own probe, which got no answer, was."""
    token: int
    """The doubter's, to know its question again."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer, given only if it is yes."""

    node_id: str
    boot_epoch: int
    token: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one node told: records of a view, all of it or some, and what it asks and answers about others."""

    sender: str
    """The node id of the teller."""
    members: tuple[Member, ...] = ()
    cluster: str = DEFAULT_CLUSTER
    """The name of the teller's cluster."""
    doubts: tuple[Doubt, ...] = ()
    proofs: tuple[Proof, ...] = ()


class _WireVersion(msgspec.Struct):
    version: int


class _WireMember(msgspec.Struct, omit_defaults=True):
    id: str
    boot: int
    incarnation: int
    address: str
    state: int
    transports: dict[str, str]
    weight: float
    draining: bool = False
    kept: int = 0


class _WireDoubt(msgspec.Struct):
    id: str
    boot: int
    ago_ms: int
    token: int


class _WireProof(msgspec.Struct):
    id: str
    boot: int
    token: int


class _WireView(msgspec.Struct, omit_defaults=True):
    version: int
    sender: str
    members: list[_WireMember]
    cluster: str = DEFAULT_CLUSTER
    doubts: list[_WireDoubt] = []
    proofs: list[_WireProof] = []


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_WireVersion)
_view_decoder = msgspec.msgpack.Decoder(_WireView)


def encode(
    sender: str,
    members: Iterable[Member],
    *,
    cluster: str = DEFAULT_CLUSTER,
    doubts: Iterable[Doubt] = (),
    proofs: Iterable[Proof] = (),
) -> bytes:
    """Return the wire form of what ``sender`` tells."""
    records = [
        _WireMember(
            id=member.node_id,
            boot=member.boot_epoch,
            incarnation=member.incarnation,
            address=member.address,
            state=int(member.state),
            transports=dict(member.transports),
            weight=member.weight,
            draining=member.is_draining,
            kept=member.kept_since,
        )
        for member in members
    ]
    asked = [_WireDoubt(doubt.node_id, doubt.boot_epoch, doubt.ago_ms, doubt.token) for doubt in doubts]
    proven = [_WireProof(proof.node_id, proof.boot_epoch, proof.token) for proof in proofs]
    return _encoder.encode(_WireView(VIEW_VERSION, sender, records, cluster, asked, proven))


def decode(blob: bytes) -> Report:
    """Return what a peer told.

    Raises :class:`~p2pkv.errors.VersionError` for a format this node doesn't know and
    :class:`~p2pkv.errors.ViewError` for anything no node could have written; drop and count both.
    """
    if len(blob) > MAX_VIEW_BYTES:
        raise ViewError(f"a cluster view of {len(blob)} bytes; at most {MAX_VIEW_BYTES} are read")
    try:
        version = _version_decoder.decode(blob).version
        if version != VIEW_VERSION:
            raise VersionError(
                f"a cluster view of format version {version}; this node reads {VIEW_VERSION}: "
                "upgrade one of the two"
            )
        wire = _view_decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ViewError(f"a cluster view that can't be read: {error}") from error
    if len(wire.members) > MAX_MEMBERS:
        raise ViewError(f"a cluster view of {len(wire.members)} members; at most {MAX_MEMBERS}")
    if not _is_text(wire.sender, MAX_ID_BYTES):
        raise ViewError(f"a cluster view from {wire.sender[:MAX_ID_BYTES]!r}, which is no node id")
    members = tuple(map(_member, wire.members))
    if len({member.node_id for member in members}) != len(members):
        raise ViewError(f"a cluster view from {wire.sender!r} names a node twice")
    if not _is_text(wire.cluster, MAX_CLUSTER_BYTES):
        raise ViewError(f"a cluster view of a cluster called {wire.cluster[:MAX_CLUSTER_BYTES]!r}")
    if len(wire.doubts) > MAX_DOUBTS or len(wire.proofs) > MAX_DOUBTS:
        raise ViewError(f"a cluster view with {len(wire.doubts)} doubts and {len(wire.proofs)} proofs")
    doubts = tuple(Doubt(doubt.id, doubt.boot, doubt.ago_ms, doubt.token) for doubt in wire.doubts)
    proofs = tuple(Proof(proof.id, proof.boot, proof.token) for proof in wire.proofs)
    return Report(wire.sender, members, wire.cluster, doubts, proofs)


def _member(wire: _WireMember) -> Member:
    if not 0 <= wire.state <= max(State):
        raise ViewError(f"a cluster view with state {wire.state}, which is none")
    member = Member(
        node_id=wire.id,
        boot_epoch=wire.boot,
        address=wire.address,
        incarnation=wire.incarnation,
        state=State(wire.state),
        transports=wire.transports,
        weight=wire.weight,
        is_draining=wire.draining,
        kept_since=wire.kept,
    )
    wrong = flaw(member)
    if wrong is not None:
        raise ViewError(f"a cluster view with a bad record: {wrong}")
    return member
