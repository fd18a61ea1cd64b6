"""Batches of events over ZMQ: a PUB socket, and a ROUTER socket that repeats those that were missed.

A message is ``[topic, sequence, batch]``; the sequence is 8 bytes, big-endian, one more each time. A subscriber that
finds a gap sends ``["", sequence]`` to the replay socket, and gets ``["", topic, sequence, batch]`` for each batch from
there on that is kept, and at last ``["", "", -1, ""]``.

Nobody is waited for: what a slow subscriber's queue has no room for is dropped for it alone, which its next sequence
number tells. Replays go on beside new batches, some of each in a turn, and take no more memory for who asks often or
never reads than for anybody else.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import zmq

from p2pkv.errors import ConfigError

KEPT = 2048
"""Batches that can be repeated, and that wait for a slow subscriber: 40 MiB each at most, with 1,024 keys a batch."""
REPLAYS = 32
"""Who is answered at a time; further requests wait in ZMQ's queues until one of these has ended. A guess; not tuned."""
REPEATED = 64
"""Batches repeated in a turn, to all askers together, at most: about a millisecond. A guess; not tuned."""
STUCK_S = 5.0
"""How long an asker may take nothing before it is given up, so that 32 of them keep nobody out for longer."""
_QUEUED = 64
"""Repeated batches that wait for one slow asker: 1.3 MiB at most. A guess; not tuned."""
_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_BYTES = 1024
"""A request or a subscription is longer by mistake or malice only; its connection is closed."""
GOODBYE_S = 0.5
"""How long the last batch may take to be on its way; a closing node waits for no slow subscriber longer."""
_REQUESTS = 8
"""Requests that are read in one turn, so that no asker holds up the events."""


@dataclass(slots=True)
class _Replay:
    next: int
    end: int
    """What is sent since the request comes over the subscription."""
    moved: float
    """When a batch last found room in the asker's queue."""


class EventPublisher:
    """Used by one thread after it is made. Raises :class:`~p2pkv.errors.ConfigError` for an address in use."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._topic = topic.encode()
        self._first = self._next = 0
        self._kept: deque[bytes] = deque(maxlen=KEPT)  # the last is number `_next - 1`
        self._replays: dict[bytes, _Replay] = {}  # by asker; who waited longest is first
        self._is_held = False
        """Whether none of the replays could go on when they were last tried."""
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
                self._replay.setsockopt(zmq.SNDHWM, _QUEUED)
                # says when an asker's queue is full, or it has gone, instead of dropping what is for it
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
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

    def begin(self, first_sequence: int) -> None:
        """Number batches from here on, before the first: above all that an earlier publisher at this address sent."""
        self._first = self._next = first_sequence

    def send(self, batch: bytes) -> None:
        """Send an encoded batch to whoever listens, and keep it. Never blocks."""
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), batch))
        self._kept.append(batch)
        self._next += 1

    def answer(self, timeout: float) -> bool:
        """Take requests, and repeat at most :data:`REPEATED` batches to those who ask.

        Waits for a request at most ``timeout`` seconds, and not while there is somebody to answer. True if somebody
        asked for batches that are not kept any more.
        """
        if self._replay is None:
            return False
        if self._replays and not self._is_held:
            timeout = 0
        elif len(self._replays) >= REPLAYS:
            time.sleep(timeout)  # all are held, and requests that must wait would end a poll at once
        for _ in range(_REQUESTS):
            # what is not read here waits in ZMQ, and then at its asker
            if len(self._replays) >= REPLAYS or not self._replay.poll(int(timeout * 1000)):
                break
            timeout = 0
            frames = self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                start = max(int.from_bytes(frames[2], "big"), self._first)
                self._replays[frames[0]] = _Replay(start, self._next, time.monotonic())
        return self._repeat()

    def _repeat(self) -> bool:
        """Go on with the replays in turn; True if one has come to what is not kept any more."""
        wants_more, self._is_held = False, True
        now = time.monotonic()
        room = REPEATED // max(1, len(self._replays))
        for asker, replay in list(self._replays.items()):
            oldest = self._next - len(self._kept)
            if replay.next < min(oldest, replay.end):
                # the first batch of all clears what a subscriber knew, so that those before it are not missed
                wants_more, replay.next = True, oldest
            n_sent = 0
            while n_sent < room and asker in self._replays and self._repeat_next(asker, replay):
                n_sent += 1
            if n_sent:
                replay.moved, self._is_held = now, False
            elif now - replay.moved > STUCK_S:
                del self._replays[asker]
        return wants_more

    def _repeat_next(self, asker: bytes, replay: _Replay) -> bool:
        """Send the next batch, or the end, after which the replay is over; False if there is no room for it."""
        assert self._replay is not None
        if is_over := replay.next >= replay.end:
            frames = (asker, b"", b"", _END, b"")
        else:
            batch = self._kept[replay.next - self._next]
            frames = (asker, b"", self._topic, replay.next.to_bytes(8, "big"), batch)
        try:
            self._replay.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            is_over = True  # the asker has gone
        replay.next += 1
        if is_over:
            del self._replays[asker]
        return True

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
