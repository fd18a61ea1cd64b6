"""The control plane's frames: the Python side of ``native/src/net/wire.h``. docs/wire.md has every byte.

A message is one ZMQ frame: a 32-byte header and a body. Bodies that native threads answer are arrays of fixed records;
bodies that Python deals with are msgpack. Everything is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from p2pkv.errors import ControlError, VersionError
from p2pkv.page import LOCATION

MAGIC = 0x766B3270
VERSION = 1
MAX_ENTRIES = 8192
"""Keys or entries a frame; larger batches are split."""
MAX_MESSAGE = 1 << 20
"""Bytes of the largest message a node takes; the sender of a larger one is disconnected."""

HEADER = struct.Struct("<IHHQQII")
PROBE_REPLY = struct.Struct("<QQ")
U32 = struct.Struct("<I")
EPOCH = struct.Struct("<16sQ")
"""The digest of a namespace's name, zeros for every namespace, and its epoch."""

U64 = struct.Struct("<Q")
TAKEN_BACK = struct.Struct("<QQ")
"""A node's log, another one after each start, and how often it has taken something back."""
TAKE_BACK = struct.Struct("<QQQQQ")
"""Whose it was, its log, its number before and after, and 1 if it was everything; mirrors ``TakeBack``."""
TAKE_OVER = struct.Struct("<16sQQII")
"""What the keys were hashed with, the sender's node key and boot, milliseconds, and 1 if other pages may go."""
TAKE_OVER_ENTRY = np.dtype([("key", "u1", 16), ("location", LOCATION)])
LET_GO = struct.Struct("<QQQ")
"""A source's node key, its log, and how often it has taken something back for good."""
FOLLOWED_PAGE = np.dtype([("key", "u1", 16), ("generation", "<u8")])

PUT_ENTRY = np.dtype([("key", "u1", 16), ("sequence", "<u8"), ("location", LOCATION)])
DROP_ENTRY = np.dtype(
    [("key", "u1", 16), ("sequence", "<u8"), ("owner", "<u8"), ("boot", "<u8"), ("generation", "<u8")]
)


class Kind(IntEnum):
    """What a request asks for. A reply has :data:`REPLY` added."""

    PROBE = 1
    GET = 2
    PUT = 3
    DROP = 4
    CONNECT = 5
    EXCHANGE = 6
    PROMOTE = 7
    RELEASE = 8
    COUNTERS = 9
    GOSSIP = 10
    CHECK = 11
    EPOCHS = 12
    LOCATE = 13
    FOLLOW = 14
    TAKE_BACK = 15
    HAND_OVER = 16
    EXPLAIN = 17
    TAKE_OVER = 18
    LET_GO = 19
    DRAIN = 20
    ROUTERS = 21
    TOUCH = 22
    HELD = 23


REPLY = 0x8000


class ReplyStatus(IntEnum):
    """How a request ended."""

    OK = 0
    VERSION = 1
    WRONG_BOOT = 2
    MALFORMED = 3
    REFUSED = 4
    FULL = 5


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: ``boot`` is the boot epoch of the node that gave it."""

    status: ReplyStatus
    boot: int
    count: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the request was done."""
        return self.status is ReplyStatus.OK


def pack_request(
    kind: Kind, request_id: int, *, boot: int, count: int, body: bytes, n_holders: int = 0
) -> bytes:
    """Build a request for the node that runs under boot epoch ``boot``, or under any if 0.

    ``n_holders``: how many of a page a LOCATE asks for; what it says is where replies have their status.
    """
    return HEADER.pack(MAGIC, VERSION, kind, request_id, boot, count, n_holders) + body


def answered_id(message: bytes) -> int:
    """Return the id of the request that a message answers, 0 if it is too short to tell: no request has that."""
    return int(HEADER.unpack_from(message)[3]) if len(message) >= HEADER.size else 0


def unpack_reply(message: bytes, kind: Kind, request_id: int) -> Reply | None:
    """Read the reply to a request; None if it answers another one.

    Raises :class:`~p2pkv.errors.VersionError` for another protocol version, and
    :class:`~p2pkv.errors.ControlError` for what no node could have sent.
    """
    if len(message) < HEADER.size:
        raise ControlError(f"a reply of {len(message)} bytes is shorter than its header")
    magic, version, reply_kind, answered_id, boot, count, status = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ControlError(f"a reply starts with {magic:#x}, not {MAGIC:#x}")
    if version != VERSION or status == ReplyStatus.VERSION:
        raise VersionError(
            f"the peer speaks protocol version {version}, this node {VERSION}; upgrade one of them"
        )
    if answered_id != request_id or reply_kind != kind | REPLY:
        return None
    if status not in ReplyStatus._value2member_map_ or count > MAX_ENTRIES:
        raise ControlError(f"a reply has status {status} and count {count}, which this node does not know")
    return Reply(ReplyStatus(status), boot, count, message[HEADER.size :])


def pack_connect(transport: str, half: bytes) -> bytes:
    """Build the body of a CONNECT: the transport's name and the reader's half of its handshake."""
    name = transport.encode()
    return U32.pack(len(name)) + name + half


def unpack_connect(body: bytes) -> tuple[str, bytes]:
    """Read the body of a CONNECT whose lengths the native loop has checked."""
    (size,) = U32.unpack_from(body)
    return body[4 : 4 + size].decode(), body[4 + size :]


def pack_connected(half: bytes, region: bytes) -> bytes:
    """Build the answer to a CONNECT: the owner's half and the description of its pool's region."""
    return U32.pack(len(half)) + half + region


def unpack_connected(body: bytes) -> tuple[bytes, bytes]:
    """Read the answer to a CONNECT."""
    if len(body) < U32.size:
        raise ControlError("the answer to a connect is too short")
    (size,) = U32.unpack_from(body)
    if size > len(body) - U32.size:
        raise ControlError(f"the answer to a connect names {size} bytes and has {len(body) - U32.size}")
    return body[4 : 4 + size], body[4 + size :]


def pack_epochs(epochs: Sequence[tuple[bytes, int]]) -> bytes:
    """Build the body of an EPOCHS: digests of namespaces, and their epochs."""
    return b"".join(EPOCH.pack(name, epoch) for name, epoch in epochs)


def unpack_epochs(body: bytes, count: int) -> list[tuple[bytes, int]]:
    """Read the answer to an EPOCHS. Raises :class:`~p2pkv.errors.ControlError` for what no node could have sent."""
    if len(body) != count * EPOCH.size:
        raise ControlError(f"an answer of {count} epochs has {len(body)} bytes")
    return list(EPOCH.iter_unpack(body))
