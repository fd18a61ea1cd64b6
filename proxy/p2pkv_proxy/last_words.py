"""What a client is told where no engine's answer ends its request: a refusal, an error, or that its answer broke off.

Each is bounded by how long a client may take: whoever does not take it is hung up on.
"""

from __future__ import annotations

import logging
import time

from p2pkv_proxy.bodies import error_body, respond
from p2pkv_proxy.call import AnsweredError, InstanceError
from p2pkv_proxy.cutting import CutError, Waits
from p2pkv_proxy.reply import Reply
from p2pkv_proxy.routing import RefusedError

_log = logging.getLogger(__name__)


class LastWords:
    """Those to one client, of which one is said."""

    def __init__(self, reply: Reply, waits: Waits, patience: float) -> None:
        """``patience``: seconds that the client has to take them."""
        self._reply = reply
        self._waits = waits
        self._patience = patience

    async def refuse(self, error: RefusedError) -> None:
        """Say that nobody takes the request now."""
        headers = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        if error.status == 401:
            headers = [(b"www-authenticate", b"Bearer"), (b"connection", b"close")]
        await self._respond(error.status, error_body(error.status, str(error)), headers)

    async def fail(self, status: int, message: str, *, close: bool = False) -> None:
        """Say what is wrong. ``close``: the connection ends with it."""
        headers = [(b"connection", b"close")] if close else []
        await self._respond(status, error_body(status, message), headers)

    async def repeat(self, error: AnsweredError) -> None:
        """Say what an engine has said of the request."""
        await self._respond(error.status, error.body, content_type=error.content_type.encode())

    async def give_up(self, error: InstanceError) -> None:
        """Every attempt failed, and nothing has been sent: the last engine's own words, if it had any."""
        body = error.body or error_body(error.status, f"{error}, and no other instance did it")
        headers = [(b"retry-after", b"1")] if error.status in (429, 503) else []
        await self._respond(error.status, body, headers)

    async def break_off(self, status: int, message: str) -> None:
        """End an answer that can't go on so that nobody takes it for whole.

        A stream has a last event, unless the client doesn't take it. What is no stream has no place for one.
        """
        if not self._reply.is_stream:
            self._reply.hang_up()
            return
        self._waits.deadline = min(self._waits.deadline, time.monotonic() + self._patience)
        try:
            with self._waits.interruptible():
                await self._reply.write(b"data: " + error_body(status, message) + b"\n\n", more=False)
        except CutError:
            _log.info("a client did not take the end of its answer")
            self._reply.hang_up()

    async def _respond(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        content_type: bytes = b"application/json",
    ) -> None:
        self._waits.deadline = time.monotonic() + self._patience
        try:
            with self._waits.interruptible():
                self._reply.check_client()
                await respond(self._reply.send, status, body, headers, content_type)
        except CutError:
            self._reply.hang_up()
