"""What a client is sent, piece by piece, and for how long it has not taken the last one."""

from __future__ import annotations

import time

from p2pkv_proxy.bodies import Scope, Send
from p2pkv_proxy.cutting import Cut, CutError

_PIECE = 64 * 1024
"""A whole answer goes out in pieces of this size: what is handed over lies in memory until the client has taken it."""


class Reply:
    """The answer to one request, from its head to its last byte."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self.send = send
        self.has_begun = False
        """The client has bytes of an answer."""
        self.is_stream = False
        """They are events, behind which another one can say that no more come."""
        self.is_over = False
        """The client has all of it, or will have when it takes what was sent."""
        self._sending_since = 0.0

    def is_slow(self, now: float, patience: float) -> bool:
        """Whether the client has not taken what was sent to it for ``patience`` seconds."""
        return bool(self._sending_since) and now - self._sending_since > patience

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head."""
        self.check_client()
        self._sending_since = time.monotonic()
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        self.has_begun = True

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a part; without ``more`` it is the last."""
        self.check_client()
        self._sending_since = time.monotonic()
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = 0.0
        self.is_over = not more

    async def whole(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Send a whole answer with status 200, which may be large."""
        await self.begin(200, [*headers, (b"content-length", str(len(body)).encode())])
        for first in range(0, len(body), _PIECE):
            await self.write(body[first : first + _PIECE], more=True)
        await self.write(b"", more=False)

    def rest(self) -> None:
        """Note that nothing is being sent, however the last sending has ended."""
        self._sending_since = 0.0

    def check_client(self) -> None:
        """Send nothing more to a client that has gone: under uvloop that fails, before anybody is told that it has."""
        if self._scope["p2pkv.transport"].is_closing():
            raise CutError(Cut.CLIENT_GONE)

    def hang_up(self) -> None:
        """End the connection at once."""
        self._scope["p2pkv.hang_up"]()
