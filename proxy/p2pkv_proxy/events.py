"""Whole events of a stream, however an engine's bytes are cut into pieces."""

from __future__ import annotations

MAX_EVENT = 1 << 20
"""Bytes; the largest that engines send has the log-probabilities of some hundred tokens."""
_LF, _CRLF = b"\n\n", b"\r\n\r\n"


class EventTooLargeError(Exception):
    """An event has no end within :data:`MAX_EVENT` bytes."""


class Events:
    """Holds back the beginning of an event until its end is there: it may never come.

    Every byte is looked at once, and what is held back has a limit: one engine's endless line must not cost the loop
    that serves everybody.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._n_held = 0
        self._tail = b""
        """The end of what is held, should the blank line be cut in two."""

    @property
    def is_between(self) -> bool:
        """Whether nothing is held back."""
        return not self._held

    def feed(self, chunk: bytes) -> bytes:
        """Return the whole events that are there now; raise :class:`EventTooLargeError`."""
        seam = self._tail + chunk
        end = max(_end(seam, _LF), _end(seam, _CRLF)) - len(self._tail)
        if end <= 0:
            self._hold(chunk, seam)
            return b""
        if not self._held and end == len(chunk):
            return chunk
        events = b"".join((*self._held, chunk[:end]))
        self._held, self._n_held, self._tail = [], 0, b""
        if end < len(chunk):
            self._hold(chunk[end:], chunk[end:])
        return events

    def _hold(self, chunk: bytes, seam: bytes) -> None:
        self._n_held += len(chunk)
        if self._n_held > MAX_EVENT:
            raise EventTooLargeError
        self._held.append(chunk)
        self._tail = seam[-3:]


def _end(data: bytes, blank_line: bytes) -> int:
    """Return where the last of them ends, or 0."""
    at = data.rfind(blank_line)
    return at + len(blank_line) if at >= 0 else 0
