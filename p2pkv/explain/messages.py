"""What is asked of a node about a page, or all of its pages, and what it says: the bodies of EXPLAIN (docs/wire.md).

Both are msgpack maps. Fields that a node does not know it leaves out; of another ``version`` it says so.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from p2pkv.errors import ControlError
from p2pkv.message_types import worked_out

VERSION = 1
MOST_HOT_PAGES = 64
MAX_KEY_BYTES = 64 << 10
"""Of a key; an answer may hold no more of anything."""


@worked_out
class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which page is meant. Without ``key`` and ``id`` a node only says who it is."""

    version: int = VERSION
    key: bytes | None = None
    """What it was published as."""
    id: bytes | None = None
    """The 16 bytes that nodes know it by, if ``key`` is not known."""
    namespace: str | None = None
    """Of the key; None: each node's own."""
    request: str | None = None
    """The id of an engine's request, whose calls are asked for."""
    working_set: bool = False
    """Whether what the node has of the cluster's working set is wanted."""
    hot_pages: int = 0
    """How many of the pages that its calls fetch most are wanted."""


class Event(msgspec.Struct, frozen=True):
    """What became of the page, once."""

    at: float
    """Seconds since 1970, by the clock of the node that says it."""
    event: int
    about: str = ""
    """The id of the node that it is about, if that is another one; hexadecimal digits if that is forgotten."""


class Entry(msgspec.Struct, frozen=True):
    """What a node's part of the directory has of the page."""

    owner: str
    is_resident: bool
    is_live: bool
    """Otherwise it was taken back a moment ago."""
    is_counting: bool
    """Its owner is a member, in that boot."""
    age: float
    """Seconds since it was said."""
    nbytes: int


class Page(msgspec.Struct, frozen=True):
    """What a node knows of the page under one name: in one namespace, in one epoch."""

    namespace: str
    epoch: int
    id: bytes
    is_current: bool
    """What its calls would look for now."""
    medium: str = ""
    """pool, disk, or empty: it is not here."""
    nbytes: int = 0
    stored_at: float | None = None
    entries: tuple[Entry, ...] = ()
    events: tuple[Event, ...] = ()


class Call(msgspec.Struct, frozen=True):
    """A call of a node for a request."""

    at: float
    """When it ended, in seconds since 1970 by the clock of the node."""
    call: str
    n_pages: int
    n_found: int
    seconds: float
    missed: tuple[bytes, ...] = ()
    """Ids of pages that it did not find, the first ones."""


class WorkingSetShare(msgspec.Struct, frozen=True):
    """What a node has of its cluster's working set."""

    published: float
    found: float
    registers: bytes
    """Of a HyperLogLog over the ids of published pages."""


class HotPage(msgspec.Struct, frozen=True):
    """A page that a node's calls fetch often."""

    id: bytes
    rate: float
    """Fetches a second, at least."""


@worked_out
class Answer(msgspec.Struct, frozen=True):
    """What a node says. The first of ``pages`` is what was asked for."""

    node_id: str
    namespace: str
    epoch: int
    pages: tuple[Page, ...] = ()
    remembers_since: tuple[float, ...] = ()
    """Since when it has forgotten nothing: of what came, went, left the directory, and was missed."""
    version: int = VERSION
    working_set: WorkingSetShare | None = None
    """If it was asked for, of a node with a pool."""
    calls: tuple[Call, ...] = ()
    """For the request that was asked for."""
    hot_pages: tuple[HotPage, ...] = ()
    """Those that were asked for, the hottest first."""


_T = TypeVar("_T", Question, Answer)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Read a body. Raises :class:`~p2pkv.errors.ControlError` for what no node could have sent."""
    try:
        message = msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise ControlError(f"a body of {len(body)} bytes is no {kind.__name__.lower()}: {error}") from error
    if message.version != VERSION:
        raise ControlError(
            f"explain is spoken here in version {VERSION}, not {message.version}; upgrade one of the two"
        )
    return message


def encode(message: Question | Answer) -> bytes:
    """Build a body."""
    return msgspec.msgpack.encode(message)
