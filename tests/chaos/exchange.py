"""What an engine does with transfers: offers that peers get, puts that peers receive, withdrawals; two threads a node.

A row says which request and serial it belongs to. As soon as memory is the caller's again it is overwritten, so that a
receiver that believes a row it was not given has wrong bytes; and what the producer was told of each row is compared
with what the receiver was (:mod:`.oracle`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import numpy as np

from p2pkv import Node
from p2pkv.transfers import Offer, RowStatus

from .contents import NBYTES, NO_VERSION, Guarded, Rows, fill, rows_of, version_of
from .journal import Journal
from .load import DEADLINE_S
from .stopwatch import Stopwatch
from .threads import Threads

N_ROWS = 4
_PAUSE_S = 0.12


class Exchange(Threads):
    """Transfers between one node and all others. A request is named by the two: ``a>b`` is offered, ``a>>b`` is put."""

    def __init__(self, node: Node, names: Sequence[str], journal: Journal, *, seed: str) -> None:
        run = (self._give, self._take)
        super().__init__(node.node_id, journal, run, seed=seed, pause_s=_PAUSE_S)
        self._node = node
        self._others = [name for name in names if name != node.node_id]
        # unique in the life of the machine: a process that was started again never uses a serial twice
        self._serial = int(time.monotonic() * 1000)
        self._open: dict[str, tuple[Offer, int]] = {}

    def _give(self, rng: Random) -> None:
        rows = {name: rows_of(N_ROWS) for name in (*self._others, "put")}
        memories = [self._node.register_memory(each, readable=True) for each in rows.values()]
        go_on = True
        while go_on:
            go_on = self._guarded(lambda: self._give_one(rng, rows))
        for name in list(self._open):
            self._end(name, rows[name])
        for memory in memories:
            memory.close()

    def _give_one(self, rng: Random, rows: dict[str, Rows]) -> None:
        name = rng.choice(self._others)
        if rng.random() < 0.3:
            self._put(name, rows["put"])
        elif name not in self._open:
            request = f"{self._me}>{name}"
            serial = self._filled(request, rows[name])
            offer = self._node.transfers.offer(request, _spans(rows[name]), lease=rng.uniform(0.2, 10))
            self._open[name] = offer, serial
        elif self._open[name][0].done() or rng.random() < 0.15:
            self._end(name, rows[name])

    def _filled(self, request: str, rows: Rows) -> int:
        self._serial += 1
        fill(rows, [f"{request}/{row}" for row in range(N_ROWS)], [self._serial] * N_ROWS)
        return self._serial

    def _end(self, name: str, rows: Rows) -> None:
        """Withdraw an offer if it is not done, and use its memory for something else at once."""
        offer, serial = self._open.pop(name)
        with Stopwatch() as watch:
            statuses = offer.withdraw()
        rows[:] = 0xEE
        self._told(offer.request, serial, statuses)
        self._called("withdraw", watch, int((statuses == RowStatus.OK).sum()))

    def _put(self, name: str, rows: Rows) -> None:
        request = f"{self._me}>>{name}"
        serial = self._filled(request, rows)
        with Stopwatch() as watch:
            statuses = self._node.transfers.put(name, request, _spans(rows), timeout=DEADLINE_S)
        rows[:] = 0xEE
        self._told(request, serial, statuses)
        self._called("put", watch, int((statuses == RowStatus.OK).sum()))

    def _called(self, what: str, watch: Stopwatch, n_ok: int) -> None:
        self._journal.write("call", **watch.span, what=what, n=N_ROWS, h=n_ok)

    def _told(self, request: str, serial: int, statuses: np.ndarray) -> None:
        refused = [row for row, status in enumerate(statuses) if status != RowStatus.OK]
        self._journal.write("gave", req=request, s=serial, rows=refused)

    def _take(self, rng: Random) -> None:
        into = Guarded(N_ROWS)
        memory = self._node.register_memory(into.rows)
        go_on = True
        while go_on:
            go_on = self._guarded(lambda: self._take_one(rng, into))
        memory.close()

    def _take_one(self, rng: Random, into: Guarded) -> None:
        if not into.is_untouched():
            self._journal.write(
                "broken", what=f"{self._me}: memory of a transfer was written to after its end"
            )
        name, transfers, spans = rng.choice(self._others), self._node.transfers, _spans(into.rows)
        is_get = rng.random() < 0.6
        request = f"{name}>{self._me}" if is_get else f"{name}>>{self._me}"
        with Stopwatch() as watch:
            if is_get:
                statuses = transfers.get(name, request, spans, timeout=DEADLINE_S)
            else:
                statuses = transfers.receive(request, spans, timeout=DEADLINE_S)
        got = [
            (row, version_of(into.rows[row], f"{request}/{row}"))
            for row, status in enumerate(statuses)
            if status == RowStatus.OK
        ]
        wrong = [row for row, serial in got if serial == NO_VERSION]
        if wrong:
            self._journal.write("broken", what=f"{self._me}: WRONG BYTES in rows {wrong} of {request}")
        self._journal.write("got", req=request, rows=got)
        self._called("get" if is_get else "receive", watch, len(got))
        into.seal()


def _spans(rows: Rows) -> np.ndarray:
    addresses = rows.ctypes.data + np.arange(len(rows)) * NBYTES
    return np.stack([addresses, np.full(len(rows), NBYTES)], axis=1).astype(np.int64)
