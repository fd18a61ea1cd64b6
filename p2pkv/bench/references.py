"""What moves the same bytes with nothing around it: copies within this process, raw streams from the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from p2pkv import _native
from p2pkv.bench.errors import BenchError
from p2pkv.bench.pair import Move, Pair, spans_of

copy_spans = _native.bench_copy_spans

MEMCPY = "memcpy"
NON_TEMPORAL = "non-temporal copy"


def copy(pair: Pair, moves: Sequence[Sequence[Move]], *, non_temporal: bool) -> list[Callable[[], None]]:
    """Return a job a thread that copies from shared memory of this process to where the moves go."""
    return [
        partial(
            copy_spans,
            pair.destination.address,
            pair.source.address,
            spans_of(part),
            non_temporal=non_temporal,
        )
        for part in moves
    ]


def stream_name(n: int) -> str:
    """Return what ``n`` raw streams are called."""
    return f"{n} raw stream{'s' if n > 1 else ''}"


CONTINUOUS = "1 raw stream, not asked by call"


class Streams:
    """Connections over which the owner sends what it is asked for, with scatter-gather on both sides."""

    def __init__(self, pair: Pair, n: int) -> None:
        self._pair = pair
        port = pair.owner.call("serve_streams")
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(n)]
        for stream in self._sockets:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(None)

    def jobs(self, moves: Sequence[Sequence[Move]], n_streams: int, batch: int) -> list[Callable[[], None]]:
        """Return a job a stream, each with a share of the moves, that asks for ``batch`` pages at a time."""
        flat = [move for part in moves for move in part]
        shares = [share for i in range(n_streams) if (share := flat[i::n_streams])]
        return [
            partial(self._receive, stream, share, batch)
            for stream, share in zip(self._sockets, shares, strict=False)
        ]

    def _receive(self, stream: socket.socket, moves: Sequence[Move], batch: int) -> None:
        address = self._pair.destination.address
        error = _native.bench_receive_spans(stream.fileno(), address, spans_of(moves), batch)
        if error:
            raise BenchError(f"a raw stream broke: {os.strerror(error)}")

    def close(self) -> None:
        for stream in self._sockets:
            stream.close()
