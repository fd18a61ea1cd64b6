"""Requests whose answers may come after their time: who asks goes on, and takes them in once they are there.

:class:`~p2pkv.control.sockets.Calls` throws away the sockets of those who have not answered in time, and with them
what has been done of their handshakes. Where a whole machine is late that makes everybody later still, until nobody is
heard any more. Here a connection waits on, and what is asked next goes by it too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from p2pkv.control.idle_lines import Line
from p2pkv.control.sockets import GLANCE_MS, ControlClient, Request, Socket
from p2pkv.control.wire import Reply, answered_id, pack_request, unpack_reply
from p2pkv.errors import ClosedError, ControlError, VersionError

PATIENCE_S = 4.0
"""Longer than a member that is silent is taken for alive: until then its answer may still speak for it."""
_WAYS_A_PEER = 4
"""That wait at once: one that has waited for its part of the patience is not asked by again. A new connection gets
through a network that works again at once, where an old one waits for its next repetition."""
_MAX_WAYS = 1024
"""That wait at once, of all peers. Beyond it the one that has waited longest is given up."""

_MESSAGES_AT_ONCE = 64
"""So many are read of one connection at a look, so that no peer holds up the others by sending without end."""


class LateAnswer(NamedTuple):
    """It came after its call had ended. ``asked_at`` is a time of :func:`time.monotonic`."""

    request: Request
    asked_at: float
    reply: Reply


@dataclass(eq=False, slots=True)
class _Way:
    """A connection to a peer with unanswered requests, oldest first.

    It has several lines as long as it is not known by which of several secrets the peer goes. ``is_guessed``: it has
    one for a secret of several, by which the peer went when it was asked last.
    """

    address: str
    lines: list[Line]
    is_guessed: bool
    asked: dict[int, tuple[Request, float]] = field(default_factory=dict)

    @property
    def waits_since(self) -> float:
        return next((asked_at for _, asked_at in self.asked.values()), math.inf)


class PatientLines:
    """Asks peers as a :class:`ControlClient` does, by its sockets, and keeps those that wait. Used by one thread.

    What waits is closed with the client's context at the latest.
    """

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._ways: dict[str, deque[_Way]] = {}
        self._by_socket: dict[Socket, _Way] = {}
        self._open: set[int] = set()  # requests that may still be answered
        self._late: deque[LateAnswer] = deque(maxlen=_MAX_WAYS)
        self.patience_s = PATIENCE_S
        """How long an answer is waited for. Whoever finds that all are late may make it longer."""

    def ask(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[Reply | None]:
        """Send every request at once; return when all are answered or after ``timeout`` seconds. None: no answer yet.

        ``meanwhile``, which may not ask here, is called at each glance that has not seen all. Raises
        :class:`ClosedError`.
        """
        self._give_up_old()
        now = time.monotonic()
        wanted = {
            request_id: index
            for index, request in enumerate(requests)
            if (request_id := self._send(request, now)) is not None
        }
        out: list[Reply | None] = [None] * len(requests)
        left = timeout
        while True:
            for request_id, answer in self._taken(left):
                if (index := wanted.get(request_id)) is not None:
                    out[index] = answer.reply
                else:
                    self._late.append(answer)
            # looked at before the time, or who could not run for a while would miss what has long been there
            if left <= 0 or wanted.keys().isdisjoint(self._open):
                break
            if meanwhile is not None:
                meanwhile()
            left = max(0.0, now + timeout - time.monotonic())
        for request, reply in zip(requests, out, strict=True):
            if reply is None:
                self._client.note_silent(request.address)
        return out

    def late(self) -> list[LateAnswer]:
        """Return what has come since it was asked for last, the newest 1,024 at most. Never blocks."""
        self._late.extend(answer for _, answer in self._taken(0.0))
        late = list(self._late)
        self._late.clear()
        self._give_up_old()
        return late

    @property
    def n_waiting(self) -> int:
        """How many connections wait."""
        return sum(map(len, self._ways.values()))

    def _give_up_old(self) -> None:
        too_old = time.monotonic() - self.patience_s
        ways = sorted((way for ways in self._ways.values() for way in ways), key=lambda way: way.waits_since)
        n_too_many = len(ways) - _MAX_WAYS
        for position, way in enumerate(ways):
            if way.waits_since < too_old or position < n_too_many:
                self._give_up(way)

    def _send(self, request: Request, now: float) -> int | None:
        """Send a request by the way that its address has, or a new one; None where there can be none."""
        way = self._way(request.address, now)
        if way is None:
            return None
        request_id = self._client.next_id()
        message = pack_request(
            request.kind, request_id, boot=request.boot, count=request.count, body=request.body
        )
        way.asked[request_id] = (request, now)
        self._open.add(request_id)
        for line in way.lines:
            line.socket.send(message, zmq.DONTWAIT)
        return request_id

    def _way(self, address: str, now: float) -> _Way | None:
        ways = self._ways.get(address)
        last = ways[-1] if ways else None
        if last is not None and self._may_yet_answer(last, now):
            return last
        if last is not None:
            self._client.doubt(address)
        lines = self._client.borrow(address)
        if not lines:
            return last
        way = _Way(address, lines, is_guessed=len(lines) < self._client.n_secrets)
        self._by_socket.update((line.socket, way) for line in lines)
        self._ways.setdefault(address, deque()).append(way)
        return way

    def _may_yet_answer(self, way: _Way, now: float) -> bool:
        """Whether to ask once more by a way that waits; a guess is good for one round of questions."""
        waits_s = now - way.waits_since
        return waits_s < self.patience_s / _WAYS_A_PEER and not (way.is_guessed and waits_s > 0)

    def _taken(self, wait_s: float) -> Iterator[tuple[int, LateAnswer]]:
        """Yield what is there, by the request's id; wait a glance for it, or for ``wait_s`` if that is less."""
        if self._client.is_closed:
            raise ClosedError("the node is closed")
        wait_ms = min(math.ceil(wait_s * 1000), GLANCE_MS)
        try:
            polled = [(socket, zmq.POLLIN) for socket in self._by_socket]
            ready = {socket for socket, _ in zmq.zmq_poll(polled, wait_ms)}
            for socket in [socket for socket in self._by_socket if socket in ready]:
                for _ in range(_MESSAGES_AT_ONCE):
                    if (way := self._by_socket.get(socket)) is None:
                        break
                    try:
                        message = socket.recv(zmq.DONTWAIT)
                    except zmq.Again:
                        break
                    if (answer := self._read(way, socket, message)) is not None:
                        yield answer
        except zmq.ZMQError as error:
            if self._client.is_closed or isinstance(error, zmq.ContextTerminated):
                raise ClosedError("the node is closed") from error
            raise

    def _read(self, way: _Way, socket: Socket, message: bytes) -> tuple[int, LateAnswer] | None:
        request_id = answered_id(message)
        if request_id not in way.asked:  # perhaps it can't be read at all
            request_id = next(iter(way.asked), 0)
        request, asked_at = way.asked.get(request_id, (None, 0.0))
        if request is None:
            return None
        try:
            reply = unpack_reply(message, request.kind, request_id)
        except (ControlError, VersionError) as error:
            complaint = "peer %s gave an answer that can't be used: %s"
            self._client.log.warning(way.address, complaint, way.address, error)
            self._give_up(way)
            return None
        if reply is None:
            return None
        self._answered(way, socket, request_id)
        return request_id, LateAnswer(request, asked_at, reply)

    def _answered(self, way: _Way, socket: Socket, request_id: int) -> None:
        """Keep the line by which an answer came; what was asked by it before will not be answered any more."""
        way.is_guessed = False
        for line in [line for line in way.lines if line.socket is not socket]:
            self._close(way, line)
        for earlier in list(way.asked):
            del way.asked[earlier]
            self._open.discard(earlier)
            if earlier == request_id:
                break
        if way.asked:
            return
        self._drop(way)
        if self._client.has_idle(way.address):  # it was asked by several ways, and one is enough again
            self._close(way, way.lines[0])
        else:
            del self._by_socket[socket]
            self._client.give_back(way.address, way.lines[0])

    def _give_up(self, way: _Way) -> None:
        self._open.difference_update(way.asked)
        for line in list(way.lines):
            self._close(way, line)
        self._drop(way)

    def _close(self, way: _Way, line: Line) -> None:
        way.lines.remove(line)
        self._by_socket.pop(line.socket, None)
        line.socket.close()

    def _drop(self, way: _Way) -> None:
        ways = self._ways[way.address]
        ways.remove(way)
        if not ways:
            del self._ways[way.address]
