"""Requests that really came: who asked for which pages, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pkv.errors import ConfigError


class Asked(NamedTuple):
    """One request."""

    at: float
    """Seconds since the trace began."""
    pages: list[int]
    """Names of its prompt's pages, in the order of the prompt: equal names are equal prefixes."""


class _Line(msgspec.Struct):
    hash_ids: list[int]
    timestamp: float = 0.0


def read_trace(path: Path) -> list[Asked]:
    """Read a trace of JSON lines with ``timestamp`` (milliseconds; optional) and ``hash_ids``; other fields are left.

    Raises :class:`~p2pkv.errors.ConfigError` that names the line that is not one, or that goes back in time.
    """
    try:
        with path.open("rb") as lines:
            asked = list(_requests(path, lines))
    except OSError as error:
        raise ConfigError(f"can't read the trace: {error}") from error
    if not asked:
        raise ConfigError(f"{path} has no requests; it needs a line of JSON each, with hash_ids")
    return asked


def _requests(path: Path, lines: Iterator[bytes]) -> Iterator[Asked]:
    decode = msgspec.json.Decoder(_Line).decode
    first = last = None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if first is None or last is None:
            first = last = line.timestamp
        if line.timestamp < last:
            raise ConfigError(
                f"{path}, line {number}: its timestamp is before that of the line above; sort the trace"
            )
        last = line.timestamp
        yield Asked((line.timestamp - first) / 1000, line.hash_ids)
