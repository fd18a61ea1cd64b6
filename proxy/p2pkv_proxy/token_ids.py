"""Token ids of large requests, which stay the JSON that they came as: engines get it unchanged.

Of two million ids Python's numbers would take a tenth of a second to make, in which nobody else has the interpreter,
and several times the body's bytes for as long as the request is under way. The router wants to know how many there are
and what they begin with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias, overload

import msgspec

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
MAX_BATCH = 4096
"""Prompts of one request."""
_BEGINNING_BYTES = 1 << 20
"""Of JSON, some 150,000 ids: requests that are the same so far are not told apart."""
_OF_IDS = b"0123456789, \t\r\n"
_DIGIT = re.compile(rb"[0-9]")


class TokenIds(Sequence[int]):
    """A list of ids in JSON. ``beginning`` has those that were made into numbers."""

    def __init__(self, json: bytes) -> None:
        """``json``: for which :func:`are_ids` holds. Raises ``msgspec.ValidationError`` if one is too large."""
        self._json = json
        self._n = json.count(b",") + 1
        end = json.rfind(b",", 0, _BEGINNING_BYTES) if len(json) > _BEGINNING_BYTES else -1
        self.beginning = _numbers(json[:end] + b"]" if end > 0 else json)

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        last = index.stop if isinstance(index, slice) else index
        is_begun = last is not None and 0 <= last < len(self.beginning)
        return (self.beginning if is_begun else _numbers(self._json))[index]


def decode_large(raw: bytes) -> dict[str, object]:
    """Parse a body, of which token ids in a list, or in lists in a list, are ``msgspec.Raw``: JSON as it came.

    Raises ``msgspec.DecodeError``.
    """
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {
        name: _of_ids(value) if name in ("prompt", "input_ids") else msgspec.json.decode(value)
        for name, value in fields.items()
    }


def _of_ids(value: msgspec.Raw) -> object:
    json = bytes(value)
    if are_ids(json):
        return value
    is_nested = json.lstrip()[:1] == b"[" and json.count(b"[") <= MAX_BATCH + 1
    if not is_nested or json.lstrip()[1:].lstrip()[:1] != b"[":
        return msgspec.json.decode(json)
    parts = msgspec.json.decode(json, type=list[msgspec.Raw])
    return [part if are_ids(bytes(part)) else msgspec.json.decode(part) for part in parts]


def are_ids(json: bytes) -> bool:
    """Whether valid JSON is a list of numbers that may be ids, with at least one: in two passes over its bytes."""
    return json.translate(None, _OF_IDS) == b"[]" and _DIGIT.search(json) is not None


def _numbers(json: bytes) -> list[int]:
    return msgspec.json.decode(json, type=list[Id])
