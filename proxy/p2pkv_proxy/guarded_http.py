"""uvicorn's HTTP protocol with bounds on what comes before a request's body: its size, and how long it may take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from p2pkv_proxy.idle_connections import IDLE, IdleConnections

HEADER_TIMEOUT_S = 10.0
"""From a connection's or a request's first byte to the end of its headers."""
MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 16
"""Requests of one connection that wait for the one before; hardly any client sends a second."""
MAX_PIECES = 1 << 16
"""A body may come in no more pieces: each costs as much as hundreds of bytes, and all others wait meanwhile."""
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_HIDDEN = b"\r\nx-upgrd:"
_NAME = b"upgrade:"
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})", re.IGNORECASE)
_PIECES = b"\r\ntransfer-encoding:"
"""Who says so does not say in the headers where the body ends."""
UNSENT_S = 30
"""For a client to take the end of its answer."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """Hangs up on who opens a connection and says nothing, sends headers drop by drop, or too many of them.

    So it does on who sends requests and requests without taking an answer; what they have sent is not read meanwhile.

    A request's scope has ``p2pkv.hang_up``, which ends the connection at once, the connection's ``p2pkv.transport``,
    ``p2pkv.is_crumbled`` once its body has come in too many pieces, and the set ``p2pkv.on_gone`` of what is called
    when the client has gone: waiting for that by ASGI's ``receive`` would take a task for each request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._has_begun = False
        """Whether some of these headers came, which may be behind the end of another request."""
        self._tail = b""
        """What was passed on before ended with this, should a line's end be cut in two."""
        self._held = b""
        """This came behind it, and may be the beginning of a header that is hidden."""
        self._n_pieces = 0
        """So many has the body that comes had so far."""
        self._on_gone: set[Callable[[], None]] = set()
        if IDLE not in self.app_state:  # which all connections of one server are given
            self.app_state[IDLE] = IdleConnections()
        self._idle: IdleConnections = self.app_state[IDLE]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        self._idle.add_stranger(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._idle.discard(self)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client has reset the connection
        super().connection_lost(exc)
        for tell in list(self._on_gone):
            tell()

    def data_received(self, data: bytes) -> None:
        if self._n_pieces > MAX_PIECES:
            if self.cycle.response_complete:
                self._hang_up()
            return  # until then: the request is refused, and the connection ends with that
        if self._in_headers:
            if not self._has_begun:
                data = data.lstrip(b"\r\n")  # such as some clients send behind a body (RFC 9112, 2.2)
                if not data:
                    return
            if self._header_timer is None:
                self._expect_headers()
            self._header_bytes += len(data)
            data = self._held + data
            # a body that came with the headers counts here as well; it does not come again
            if self._header_bytes > MAX_HEADER_BYTES and _END not in self._tail + data[:MAX_HEADER_BYTES]:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
            data, self._held = without_upgrade(self._tail, data)
            self._tail = (self._tail + data)[-3:]
        if data:
            super().data_received(data)
            if self._has_begun and self._in_headers and not self._tail:
                self._tail = data[-3:]  # these headers began behind the end of another request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._has_begun = True

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._idle.discard(self)
        self._in_headers = False
        self._header_bytes = self._n_pieces = 0
        self._tail = self._held = b""
        self.scope["p2pkv.transport"] = self.transport  # type: ignore[typeddict-unknown-key]
        self.scope["p2pkv.on_gone"] = self._on_gone  # type: ignore[typeddict-unknown-key]
        if self.transport.is_closing():
            return
        super().on_headers_complete()
        # the task of the request begins in a later turn of the loop
        self.scope["p2pkv.hang_up"] = partial(self._hang_up_on, self.cycle)  # type: ignore[typeddict-unknown-key]
        if len(self.pipeline) > MAX_PIPELINED:
            self._hang_up()

    def on_body(self, body: bytes) -> None:
        self._n_pieces += 1
        if self._n_pieces <= MAX_PIECES:
            super().on_body(body)
        else:
            self.scope["p2pkv.is_crumbled"] = True  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._has_begun = True, False

    def on_response_complete(self) -> None:
        keep = self.config.timeout_keep_alive
        self.timeout_keep_alive = keep if self._is_all_sent() else min(UNSENT_S, keep)
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # resumed for each answer, it would read more requests than it answers
        elif self.cycle.response_complete and not self.transport.is_closing():
            self._idle.add_kept(self)

    def timeout_keep_alive_handler(self) -> None:
        if self._is_all_sent() and (rest := self.config.timeout_keep_alive - self.timeout_keep_alive) > 0:
            self.timeout_keep_alive = self.config.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(rest, self.timeout_keep_alive_handler)
        else:
            self.end_idle()

    def end_idle(self) -> None:
        if self._is_all_sent():
            self.transport.close()
        else:
            self._hang_up()  # closing would wait for a client that takes nothing

    def _is_all_sent(self) -> bool:
        return self.transport.get_write_buffer_size() == 0

    def _hang_up(self) -> None:
        self.transport.abort()

    def _hang_up_on(self, cycle: RequestResponseCycle) -> None:
        # uvicorn tells only the last of several requests that the connection is lost, and that in a later turn of the
        # loop; of any other it would log that it has no answer, and write one to nobody
        cycle.disconnected = True
        self._hang_up()

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._late)

    def _late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def without_upgrade(before: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Hide the wish for another protocol, which may be ignored: httptools would take the body for that protocol's.

    Java's HTTP client has it in every request without TLS (``Upgrade: h2c``). ``before`` is the end of the headers that
    were passed on. Returns what may be passed on now, with nothing in another place, and what must wait for more, since
    it may be the beginning of the wish.
    """
    head, end, rest = (before + data).partition(_END)
    head = _UPGRADE.sub(_HIDDEN, head)
    if end:
        # of headers that came in pieces it is not known here how long their body is, so all of it may be that
        rest = rest if before else _without_upgrades(head, rest)
        return (head + end + rest)[len(before) :], b""
    _, line, name = head.rpartition(b"\r\n")
    n_held = len(name) if line and _NAME.startswith(name.lower()) else 0
    return head[len(before) : len(head) - n_held], name[:n_held]


def _without_upgrades(head: bytes, rest: bytes) -> bytes:
    """Hide wishes in what is behind a request's headers and its body, which may have such lines of its own."""
    passed: list[bytes] = []
    at = 0
    while at < len(rest) and _PIECES not in head.lower():
        length = _LENGTH.search(head)
        begin = min(len(rest), at + (int(length[1]) if length is not None else 0))
        end = rest.find(_END, begin) + len(_END)
        end = end if end >= len(_END) else len(rest)
        head = _UPGRADE.sub(_HIDDEN, rest[begin:end])
        passed += rest[at:begin], head
        at = end
    return b"".join((*passed, rest[at:]))
