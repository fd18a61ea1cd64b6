"""A subscriber to KV events as a router has one: it follows, notices gaps, and asks for what it missed."""

from __future__ import annotations

import time
from itertools import chain

import msgspec
import zmq

from p2pkv import Node
from p2pkv.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def residents(node: Node) -> set[tuple[str, bytes]]:
    """Return what a node has, pairs of medium and key: what a subscriber must know when all is quiet."""
    caching = node._parts.caching
    assert caching is not None
    keys, _, cursor = caching.pool.list(0, 1 << 20)
    assert not cursor
    on_disk, cursor = caching.tier.list(0, 1 << 20) if caching.tier is not None else (keys[:0], 0)
    assert not cursor
    return set(
        chain((("CPU", key.tobytes()) for key in keys), (("STORAGE", key.tobytes()) for key in on_disk))
    )


_decoder = msgspec.msgpack.Decoder(KVEventBatch)
_REPLAY_S = 5.0


class Subscriber:
    """What it knows after :meth:`follow` is :attr:`known`: pairs of medium and key."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(100_000)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RECONNECT_IVL, 5)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self.known: set[tuple[str, bytes]] = set()
        self.last: int | None = None
        self.is_whole = False
        """False until everything was told since the last loss that could not be repaired."""
        self.n_gaps = 0
        self.n_replayed = 0

    def follow(self, timeout: float, *, lose: int = 0) -> bool:
        """Take what comes within ``timeout`` seconds; throw the first ``lose`` messages away. False: nothing came."""
        came = False
        while self._sub.poll(timeout * 1000):
            came = True
            timeout = 0
            _, sequence, batch = self._sub.recv_multipart()
            if lose:
                lose -= 1
                continue
            self._take(int.from_bytes(sequence, "big"), batch)
        return came

    def _take(self, sequence: int, batch: bytes) -> None:
        if self.last is None or sequence > self.last + 1:
            self.n_gaps += 1
            self.replay()
        if self.last is not None and sequence <= self.last:
            return  # the replay had it
        if self.last is not None and sequence != self.last + 1:
            self.is_whole = False  # until all is told again
        self._apply(sequence, batch)

    def replay(self) -> None:
        """Ask for all that is kept from what was seen last on."""
        asking = self._context.socket(zmq.DEALER)  # REQ would take the first answer only
        asking.setsockopt(zmq.LINGER, 0)
        try:
            asking.connect(self._replay_endpoint)
            start = 0 if self.last is None else self.last + 1
            asking.send_multipart((b"", start.to_bytes(8, "big")))
            deadline = time.monotonic() + _REPLAY_S
            while asking.poll(max(0.0, deadline - time.monotonic()) * 1000):
                _, _, sequence, batch = asking.recv_multipart()
                if sequence == (-1).to_bytes(8, "big", signed=True):
                    return
                number = int.from_bytes(sequence, "big")
                if self.last is None or number > self.last:
                    self.is_whole &= self.last is not None and number == self.last + 1
                    self._apply(number, batch)
                    self.n_replayed += 1
        finally:
            asking.close()

    def _apply(self, sequence: int, batch: bytes) -> None:
        self.last = sequence
        for event in _decoder.decode(batch).events:
            if isinstance(event, BlockStored):
                self.known.update((event.medium or "", key) for key in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.known.difference_update((event.medium or "", key) for key in event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.known.clear()
                self.is_whole = True

    def close(self) -> None:
        self._context.destroy(linger=0)
