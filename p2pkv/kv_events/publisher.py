"""Batches of events over ZMQ: a PUB socket, and a ROUTER socket that repeats those that were missed.

A message is ``[topic, sequence, batch]``; the sequence is 8 bytes, big-endian, one more each time. A subscriber that
finds a gap sends ``["", sequence]`` to the replay socket, and gets ``["", topic, sequence, batch]`` for each batch from
there on that is kept, and at last ``["", "", -1, ""]``.

Nobody is waited for: what a slow subscriber's queue has no room for is dropped for it alone, which its next sequence
number tells.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import zmq

from p2pkv.errors import ConfigError

KEPT = 2048
"""Batches that can be repeated, and that wait for a slow subscriber: 40 MiB each at most, with 1,024 keys a batch."""
_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_BYTES = 1024
"""A request or a subscription is longer by mistake or malice only; its connection is closed."""
GOODBYE_S = 0.5
"""How long the last batch may take to be on its way; a closing node waits for no slow subscriber longer."""
_REQUESTS = 8
"""Requests that are answered in one turn, so that no asker holds up the events."""


class EventPublisher:
    """Used by one thread after it is made. Raises :class:`~p2pkv.errors.ConfigError` for an address in use."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, first_sequence: int) -> None:
        """``first_sequence`` must be above all that an earlier publisher at this address sent."""
        self._topic = topic.encode()
        self._first = self._next = first_sequence
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        # of its own: closing it waits for nobody, whatever else the process does with ZMQ
        self._context = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(KEPT)
            self._bind(self._pub, "kv_events", endpoint)
            self._replay: zmq.Socket[bytes] | None = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, KEPT + 1)
                self._bind(self._replay, "kv_events_replay", replay_endpoint)
            undo.pop_all()
        self.endpoint = _bound(self._pub)
        self.replay_endpoint = None if self._replay is None else _bound(self._replay)

    def _bind(self, socket: zmq.Socket[bytes], setting: str, endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {setting} {endpoint!r}: {error}") from error

    def send(self, batch: bytes) -> None:
        """Send an encoded batch to whoever listens, and keep it. Never blocks."""
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), batch))
        self._kept.append((self._next, batch))
        self._next += 1

    def answer(self, timeout: float) -> bool:
        """Repeat batches to whoever asks, waiting for a request at most ``timeout`` seconds.

        True if somebody asked for batches that are not kept any more.
        """
        wants_more = False
        if self._replay is None:
            return wants_more
        for _ in range(_REQUESTS):
            if not self._replay.poll(int(timeout * 1000)):
                break
            timeout = 0
            frames = self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                wants_more |= self._repeat(frames[0], int.from_bytes(frames[2], "big"))
        return wants_more

    def _repeat(self, asker: bytes, start: int) -> bool:
        assert self._replay is not None
        for sequence, batch in self._kept:
            if sequence >= start:
                self._replay.send_multipart((asker, b"", self._topic, sequence.to_bytes(8, "big"), batch))
        self._replay.send_multipart((asker, b"", b"", _END, b""))
        # the first batch of all clears what a subscriber knew, so that those before it are not missed
        return bool(self._kept) and max(start, self._first) < self._kept[0][0]

    def finish(self, batch: bytes) -> None:
        """Send the last batch, and close once subscribers were sent all, or after :data:`GOODBYE_S`."""
        self.send(batch)
        self._pub.setsockopt(zmq.LINGER, int(GOODBYE_S * 1000))
        self._context.destroy()

    def close(self) -> None:
        """Close both sockets, and send nothing more. Idempotent."""
        self._context.destroy(linger=0)


def _bound(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
