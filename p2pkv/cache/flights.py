"""The reads of one fetch: a flight an owner, all in the air at once, and none waits for another.

An owner that has stopped must cost its own pages and nobody else's. So connections that are not there yet are made on
threads of their own, and while several owners are read, each gets short turns: bytes are moved by the thread that asks
for them, and one that waited for a silent owner alone would leave the others' lying.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.directory.view import Member, View
from p2pkv.peers.connections import UNUSABLE, Connection, PeerConnections
from p2pkv.transports.base import Status, Transfer

_TURN_S = 0.001
"""Of a flight among several: a fast memory moves 10 MB in it, and a silent owner costs the others no more a round."""


@dataclass(slots=True)
class _Flight:
    """One owner's part of a fetch, under way: a leg for each registered memory, one after another."""

    connection: Connection
    owner: _native.FetchOwner
    legs: list[int]  # the first is in the air
    began: float
    transfer: Transfer | None = None


class _Boarding:
    """Connections that are being made for one fetch. What comes when it is over goes back, for others to use."""

    def __init__(self, peers: PeerConnections, deadline: float) -> None:
        self._peers = peers
        self._deadline = deadline
        self.waiting: dict[int, _native.FetchOwner] = {}  # by the owner's key; of the thread that fetches
        self._lock = threading.Lock()  # guards the next one
        self._is_over = False
        self._ready: SimpleQueue[tuple[int, Connection | BaseException | None]] = SimpleQueue()

    def begin(self, owner: _native.FetchOwner, member: Member) -> None:
        """Have ``member`` connected to; :meth:`take` tells when it is."""
        self.waiting[owner.key] = owner
        self._peers.borrow_in_background(member, self._deadline, partial(self._connected, owner.key))

    def _connected(self, key: int, result: Connection | BaseException | None) -> None:
        with self._lock:
            if not self._is_over:
                self._ready.put((key, result))
                return
        if isinstance(result, Connection):
            self._peers.give_back(result)

    def take(self, timeout: float) -> tuple[_native.FetchOwner, Connection | None] | None:
        """Return who is connected now, or can't be; None if that takes longer. Raises what connecting raised."""
        try:
            key, result = self._ready.get(timeout=timeout) if timeout > 0 else self._ready.get_nowait()
        except Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return self.waiting.pop(key), result

    def end(self) -> None:
        """Wait for nobody any more."""
        with self._lock:
            self._is_over = True
        while not self._ready.empty():
            _, result = self._ready.get()
            if isinstance(result, Connection):
                self._peers.give_back(result)


class Flights:
    """Used by one thread, for one round of one fetch: :meth:`read` does it all."""

    def __init__(
        self,
        peers: PeerConnections,
        view: View,
        call: PageCall,
        deadline: float,
        *,
        check_sums: bool,
        count: Callable[[str, int, int], None],
    ) -> None:
        """``count`` is told of each owner's ``(transport, pages, bytes)`` that came and were right."""
        self._peers = peers
        self._view = view
        self._call = call
        self._deadline = deadline
        self._check_sums = check_sums
        self._count = count
        self._flying: list[_Flight] = []
        self._boarding = _Boarding(peers, deadline)

    def read(self, owners: Sequence[_native.FetchOwner]) -> None:
        """Read what is located from its owners; returns by the deadline, with every owner's pages settled."""
        try:
            for owner in owners:
                self._set_out(owner, is_alone=len(owners) == 1)
            self._land_all()
        finally:
            self._boarding.end()
            for flight in self._flying:
                self._peers.discard(flight.connection)

    def _set_out(self, owner: _native.FetchOwner, *, is_alone: bool) -> None:
        """Take off to an owner, or have the way to it made; settle its pages if there is none."""
        member = self._view.by_key(owner.key)
        if member is None or member.boot_epoch != owner.boot:
            owner.settle(check_sums=False)
            return
        if is_alone:
            self._take_off(owner, self._peers.borrow(member, self._deadline))
            return
        connection, is_worth_connecting = self._peers.borrow_idle(member)
        if is_worth_connecting:
            self._boarding.begin(owner, member)
        else:
            self._take_off(owner, connection)

    def _take_off(self, owner: _native.FetchOwner, connection: Connection | None) -> None:
        if connection is None:
            owner.settle(check_sums=False)
            return
        flight = _Flight(connection, owner, owner.legs, time.monotonic())
        # before anything is asked for: whatever happens then, what was asked for is called off
        self._flying.append(flight)
        self._read_leg(flight)

    def _land_all(self) -> None:
        turn = 0.0
        while self._boarding.waiting or len(self._flying) > 1:
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            self._board(0.0 if self._flying else left)
            for flight in list(self._flying):
                assert flight.transfer is not None
                if flight.transfer.advance(turn) if turn else flight.transfer.done():
                    self._land(flight)
            turn = _TURN_S
        for flight in list(self._flying):
            while flight in self._flying:
                self._land(flight)
        for owner in self._boarding.waiting.values():
            owner.settle(check_sums=False)

    def _board(self, timeout: float) -> None:
        while self._boarding.waiting and (boarded := self._boarding.take(timeout)) is not None:
            self._take_off(*boarded)
            timeout = 0.0

    def _land(self, flight: _Flight) -> None:
        """Wait for one owner's leg; go on with its next one, or settle its pages."""
        assert flight.transfer is not None
        connection, owner = flight.connection, flight.owner
        statuses = flight.transfer.wait(max(0.0, self._deadline - time.monotonic()))
        worst = Status(owner.land(flight.legs.pop(0), statuses))
        if flight.legs and worst not in UNUSABLE:
            self._read_leg(flight)
            return
        self._flying.remove(flight)
        n_pages, nbytes = owner.settle(check_sums=self._check_sums)
        seconds = time.monotonic() - flight.began
        self._peers.release(connection, worst, n_pages=n_pages, nbytes=nbytes, seconds=seconds)
        self._count(connection.transport, n_pages, nbytes)

    def _read_leg(self, flight: _Flight) -> None:
        """Start reading those pieces of an owner's pages that lie in one registered memory."""
        table, leg = self._call.table, flight.legs[0]
        spans, words = flight.owner.plan(leg, table.bases)
        local = table.memories[leg].region(flight.connection.transport)
        flight.transfer = flight.connection.endpoint.read(local, flight.connection.remote, spans, words=words)
