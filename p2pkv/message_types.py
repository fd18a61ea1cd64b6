"""Types of what comes over wires and from files, worked out before any thread reads one.

msgspec works out a type when something of it is first read. It keeps what it has begun where other threads find it, and
lets them run meanwhile: a second thread that reads its first message of that type then ends the process, which was seen
with msgspec 0.22 where several ranks of a prefill instance heard their first wants at once. While a module is imported
other threads wait for it, so that is when types are worked out: here, or by a `Decoder` that a module has.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

_Type = TypeVar("_Type", bound=type)


def worked_out(kind: _Type) -> _Type:
    """Have msgspec know a type, and all that it is made of, which must be defined above: a decorator."""
    msgspec.msgpack.Decoder(kind)
    return kind
