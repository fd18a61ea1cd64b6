"""What moves the same bytes with nothing around it: copies within this process, raw streams from the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv_bench._native import receive_spans
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pair, spans_of
from p2pkv_bench.rounds import Call

MEMCPY = "memcpy"
CHOSEN_COPY = "chosen copy"


def copy(pages: NDArray[np.uint8], first: int, rows: NDArray[np.uint8], *, is_chosen: bool) -> Call:
    """Return a call that copies the pages from ``first`` on to ``rows``, one after another and without the GIL.

    By memcpy, or by the routine that p2pkv copies with.
    """
    n, nbytes = rows.shape
    if is_chosen:
        table = np.full((n, 3), nbytes, np.int64)
        table[:, 0] = rows.ctypes.data + np.arange(n) * nbytes
        table[:, 1] = pages.ctypes.data + (first + np.arange(n)) * nbytes
        return partial(_native.copy_pieces, table)
    # numpy makes one memcpy of each row; in its other modes it would copy to memory of its own first
    return partial(pages.take, first + np.arange(n), 0, rows, "clip")


def copies(pair: Pair, moves: Sequence[Sequence[Move]], *, is_chosen: bool) -> list[list[Call]]:
    """Return calls that copy from shared memory of this process to where the moves go."""
    pages = pair.source.pages(moves[0][0].rows.shape[1])
    return [[copy(pages, move.page, move.rows, is_chosen=is_chosen) for move in part] for part in moves]


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

    def by_call(self, moves: Sequence[Sequence[Move]], *, n_streams: int) -> list[list[Call]]:
        """Return calls that each ask for one move; every stream, in a thread of its own, takes a share of them."""
        flat = [move for part in moves for move in part]
        return [
            [partial(self._receive, stream, move.spans) for move in flat[i::n_streams]]
            for i, stream in enumerate(self._sockets[:n_streams])
        ]

    def at_once(self, moves: Sequence[Sequence[Move]]) -> list[list[Call]]:
        """Return one call that asks one stream for everything."""
        spans = spans_of([move for part in moves for move in part])
        return [[partial(self._receive, self._sockets[0], spans)]]

    def _receive(self, stream: socket.socket, spans: NDArray[np.int64]) -> None:
        address = self._pair.destination.address
        error = receive_spans(stream.fileno(), address, spans)
        if error:
            raise BenchError(f"a raw stream broke: {os.strerror(error)}")

    def close(self) -> None:
        for stream in self._sockets:
            stream.close()
