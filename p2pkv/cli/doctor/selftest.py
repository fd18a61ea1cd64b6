"""What ``p2pkv doctor`` tries out: a transport reads from itself, and every byte is compared."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from p2pkv import _native
from p2pkv.errors import TransportError
from p2pkv.transports.base import Status, Transport

_TABLE = 4096
_PAGE = 65536
_N_PAGES = 16
_GENERATION = 2
_WAIT_S = 5.0


def read_from_itself(transport: Transport) -> str:
    """Read pages through ``transport`` from memory registered with it; say how that went.

    Raises :class:`~p2pkv.errors.TransportError` if a page does not arrive, arrives wrong, or is accepted although its
    generation word says that it is another one.
    """
    with ExitStack() as undo:
        memory = _native.SharedRegion.create(_TABLE + _N_PAGES * _PAGE)
        there = memory.array
        rng = np.random.default_rng()
        there[_TABLE:] = rng.integers(0, 256, _N_PAGES * _PAGE, np.uint8)
        there[: 8 * _N_PAGES].view(np.uint64)[:] = _GENERATION
        region = transport.register_memory(memory, memory.address, memory.nbytes, readable=True)
        undo.callback(region.close)
        here = np.zeros(_N_PAGES * _PAGE, np.uint8)
        local = transport.register_memory(here, here.ctypes.data, here.nbytes, readable=False)
        undo.callback(local.close)
        endpoint = transport.open()
        undo.callback(endpoint.close)
        endpoint.bind(transport.accept(endpoint.describe()))
        remote = endpoint.attach(region.describe())
        at = np.arange(_N_PAGES, dtype=np.int64)
        spans = np.stack([at * _PAGE, _TABLE + at * _PAGE, np.full(_N_PAGES, _PAGE)], axis=1)
        words = np.stack([at * 8, np.full(_N_PAGES, _GENERATION)], axis=1).astype(np.uint64)
        words[-1, 1] += 2  # of a page that was replaced meanwhile
        began = time.perf_counter()
        statuses = endpoint.read(local, remote, spans, words=words).wait(_WAIT_S)
        seconds = time.perf_counter() - began
        if (statuses[:-1] != Status.OK).any():
            names = ", ".join(sorted({Status(status).name for status in statuses[:-1].tolist()}))
            raise TransportError(f"pages read from this machine itself ended as {names}")
        if statuses[-1] != Status.REJECTED:
            raise TransportError("a page that was replaced while it was read was not rejected")
        if not np.array_equal(here[:-_PAGE], there[_TABLE:-_PAGE]):
            raise TransportError("pages read from this machine itself have wrong bytes")
    return f"{_N_PAGES - 1} pages of {_PAGE >> 10} KiB read from itself and right, in {seconds * 1e6:.0f} us"
