"""The access log: a line of JSON for each request, when it has ended. It has no prompt, no answer and no key in it.

A thread writes, so that a disk or a pipe that is slow holds up no request; lines that it can't keep up with are dropped
and counted. The file is opened anew when it was moved away, as logrotate does.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import msgspec

from p2pkv.errors import ConfigError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000
"""Lines: a second of a busy router, some MiB."""
_MOST_TEXT = 200
"""Characters of what a client says: its path, its model."""
_CLOSE_S = 2.0
"""For what waits to be written when the router ends."""
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Entry(msgspec.Struct, kw_only=True):
    """What is said of a request. Times in seconds; what is not known is null."""

    at: str
    """When it came, in UTC."""
    request_id: str | None
    trace_id: str | None
    """Of the client's ``traceparent``."""
    key: str | None
    """The name of the API key that it had."""
    method: str
    path: str
    model: str | None
    is_stream: bool | None
    outcome: str
    """As in ``p2pkv_proxy_requests_total``."""
    prefill: str | None
    decode: str | None
    reason: str | None
    """The policies' words for the last pair."""
    attempts: int
    resumed: int
    """How often another instance went on with its stream."""
    prompt_tokens: int | None
    """As the router takes them to be."""
    first_byte_seconds: float | None
    seconds: float


class AccessLog:
    """Writes to ``path``; ``-`` is stdout. Any thread may give it entries."""

    def __init__(self, path: str, dropped: Callable[[], None]) -> None:
        """``dropped`` is called, by any thread, for each line that is not written. Raises :class:`ConfigError`."""
        self._dropped = dropped
        self._warn = LimitedLog(_log)
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        try:
            self._handler: logging.Handler = (
                logging.StreamHandler(sys.stdout)
                if path == "-"
                else logging.handlers.WatchedFileHandler(path, encoding="utf-8")
            )
        except OSError as error:
            raise _unwritable(path, error) from error
        self._handler.handleError = self._failed  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, name="p2pkv-access-log", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Have an entry written. Never waits."""
        try:
            self._lines.put_nowait(msgspec.json.encode(entry).decode())
        except queue.Full:
            self._dropped()
            self._warn.warning(
                "full", "the access log is not written as fast as requests end; lines are dropped"
            )

    def close(self) -> None:
        """Write what waits, as far as there is time. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._lines.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # who doesn't take lines now won't take the last ones; the thread ends with the process
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._handler.handle(logging.makeLogRecord({"msg": line}))
            except OSError:  # of opening it anew
                self._failed(None)
        self._handler.close()

    def _failed(self, record: logging.LogRecord | None) -> None:
        """Take what failed in writing; it is called where the exception was caught."""
        self._dropped()
        self._warn.warning(
            "failed", "the access log can't be written: %s; lines are dropped", sys.exc_info()[1]
        )


def check_writable(path: str | None) -> None:
    """Raise :class:`ConfigError` if an access log could not be written there."""
    if path is not None and path != "-":
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the access log to {path}: {error.strerror}")


def utc(seconds: float) -> str:
    """Return a time as RFC 3339 has it, to the millisecond."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def came_at(began: float) -> str:
    """Return when something came whose monotonic time is ``began``."""
    return utc(time.time() - (time.monotonic() - began))


def trace_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the id of the trace that a client says its request is part of."""
    for name, value in headers:
        if name == b"traceparent" and (found := _TRACE.fullmatch(value)) is not None:
            return found[1].decode()
    return None


def shortened(text: str | None) -> str | None:
    """Return what may stand in a line of a text that a client has chosen."""
    return text[:_MOST_TEXT] if text is not None else None
