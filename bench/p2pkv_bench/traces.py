"""Traces of requests that really came, in the form in which Mooncake published its own: a line of JSON a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from p2pkv.errors import ConfigError

_MAX_LINE = 1 << 20


class TracedRequest(msgspec.Struct, frozen=True):
    """One request. Other fields of its line are left."""

    hash_ids: tuple[int, ...]
    """Names of its prompt's pages, in the order of the prompt: equal names are equal prefixes."""
    timestamp: float = 0.0
    """Milliseconds at which it came."""
    input_length: int = 0
    """Tokens of its prompt; 0 where the trace does not say it."""
    output_length: int = 0
    """Tokens that were generated; 0 where the trace does not say it."""


def read_trace(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a trace, reading as it goes.

    Raises :class:`~p2pkv.errors.ConfigError` where the file can't be read, and for the first line that is no request.
    """
    decode = msgspec.json.Decoder(TracedRequest).decode
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield decode(line[:_MAX_LINE])
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"can't read the trace: {error}") from error


def read_whole_trace(path: Path) -> list[TracedRequest]:
    """Return all requests of a trace; ConfigError too where there is none, or one is older than the one before it."""
    requests: list[TracedRequest] = []
    for number, request in enumerate(read_trace(path), 1):
        if requests and request.timestamp < requests[-1].timestamp:
            raise ConfigError(
                f"{path}: the timestamp of request {number} is before that of the one above; sort the trace"
            )
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path} has no requests; it needs a line of JSON each, with hash_ids")
    return requests
