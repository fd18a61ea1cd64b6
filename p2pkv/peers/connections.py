"""Reading peers' memory: which transport reaches whom, handshakes, and endpoints lent to one batch at a time.

A peer's endpoints are opened on demand, one more for each batch that runs at the same time, and kept for the next.
An endpoint that timed out or lost its peer is closed. A peer that made a batch time out is left alone for
:data:`AVOID_S`, so that one stopped node costs its deadline once and not in every call. One that takes longer to
connect to than calls have time is connected to between them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from p2pkv.directory.view import Member, State, View
from p2pkv.errors import TransportError
from p2pkv.metrics import Metrics
from p2pkv.transports import connecting
from p2pkv.transports.base import Endpoint, RemoteRegion, Resource, Status, Transport

_log = logging.getLogger(__name__)

AVOID_S = 1.0
"""About as long as membership takes to suspect a node that has stopped."""
FAIR_CHANCE_S = 0.1
"""A peer that was given less time than this is not blamed for a time-out."""
PATIENT_CONNECT_S = 20.0
"""What a connection gets that was not made within a call; a guess, not tuned."""
RETRY_TRANSPORT_S = (1.0, 30.0)
"""Until a transport that did not reach a peer is tried again with it: at first, and at most.

Twice as long after each failure, because it may have been this node that was short of something for a moment.
"""
IDLE_S = 10.0
"""How long a connection that nobody needs is kept; each costs its owner a descriptor and, by transport, a thread."""
UNUSABLE = frozenset({Status.PEER_LOST, Status.TIMED_OUT, Status.CANCELED})
"""An endpoint whose batch had one of these is done for."""

Connect = Callable[[Member, str, bytes, float], "tuple[bytes, bytes] | None"]
"""``(member, transport, our half, deadline)`` to the peer's half and its region's description; None: no answer or
refused. The control plane's part of a handshake."""


@dataclass(slots=True)
class PeerTraffic:
    """What this node has read from one peer."""

    node_id: str
    transport: str
    n_pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Peer:
    member: Member
    idle: list[Connection] = field(default_factory=list)
    traffic: dict[str, PeerTraffic] = field(default_factory=dict)  # by transport
    unusable: dict[str, float] = field(default_factory=dict)  # transport -> until when
    n_failures: dict[str, int] = field(default_factory=dict)  # by transport, since it worked
    avoid_until: float = 0.0
    patient: set[str] = field(
        default_factory=set
    )  # transports over which it is being connected to between calls


@dataclass(slots=True, eq=False)
class Connection:
    """An endpoint bound to a peer's pool, lent to one batch."""

    member: Member
    transport: str
    endpoint: Endpoint
    remote: RemoteRegion
    has_read: bool = False
    idle_since: float = 0.0


class PeerConnections(Resource):
    """Thread-safe. Borrowing blocks for one handshake at most, bounded by its deadline (``time.monotonic()``)."""

    def __init__(
        self,
        transports: Sequence[Transport],
        connect: Connect,
        metrics: Metrics,
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._connect = connect
        self._metrics = metrics
        # guards _peers, what is in it, _borrowed, _connecting, _sweeper and _closed
        # reentrant, since a signal's handler may close the node wherever a thread is
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._borrowed: set[Connection] = set()
        self._connecting: set[threading.Thread] = set()
        self._sweeper: threading.Timer | None = None
        self._closed = False

    @property
    def domains(self) -> dict[str, str]:
        """Name to domain of every transport, in order of preference."""
        return {name: transport.domain for name, transport in self._transports.items()}

    def set_view(self, view: View) -> None:
        """Drop the connections to nodes that are gone or were restarted."""
        with self._lock:
            gone = [
                node_id
                for node_id, peer in self._peers.items()
                if (now := view.get(node_id)) is None
                or not now.is_present
                or now.boot_epoch != peer.member.boot_epoch
            ]
            closing = [connection for node_id in gone for connection in self._peers.pop(node_id).idle]
        for connection in closing:
            connection.endpoint.close()

    def borrow(self, member: Member, deadline: float) -> Connection | None:
        """Return a connection to ``member``, or None if it can't be reached now. Give it back with :meth:`release`."""
        connection, candidates = self._find(member)
        return connection or self._connect_by(member, candidates, deadline)

    def borrow_idle(self, member: Member) -> tuple[Connection | None, bool]:
        """Return a connection that is there, or None and whether :meth:`borrow` might make one. Never blocks."""
        connection, candidates = self._find(member)
        return connection, bool(candidates)

    def borrow_in_background(
        self, member: Member, deadline: float, then: Callable[[Connection | BaseException | None], None]
    ) -> None:
        """Give what :meth:`borrow` returns or raises to ``then``, on another thread, soon after ``deadline``."""

        def run() -> None:
            result: Connection | BaseException | None
            try:
                result = self.borrow(member, deadline)
            except BaseException as error:  # noqa: BLE001  # the top of a thread: told to who waits for it
                result = error
            then(result)

        if not self._start_connecting(run):  # no thread is to be had: then others wait for this one
            run()

    def _start_connecting(self, connect: Callable[[], None]) -> bool:
        """Run ``connect`` on a thread of its own, which :meth:`close` joins; return whether there is one."""

        def run() -> None:
            connect()
            with self._lock:
                self._connecting.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="p2pkv-connect", daemon=True)
        with self._lock:
            self._connecting.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._connecting.discard(thread)
            return False
        return True

    def _connect_between_calls(self, member: Member, name: str) -> None:
        """Make a connection for later calls, with more time than they have: each would begin anew, and none succeed."""
        with self._lock:
            peer = self._peers.get(member.node_id)
            if self._closed or peer is None or name in peer.patient:
                return
            peer.patient.add(name)

        def run() -> None:
            try:
                if self._is_proven(member, name, time.monotonic() + PATIENT_CONNECT_S):
                    peer.avoid_until = 0.0
            finally:
                with self._lock:
                    peer.patient.discard(name)

        if not self._start_connecting(run):
            with self._lock:
                peer.patient.discard(name)

    def _is_proven(self, member: Member, name: str, deadline: float) -> bool:
        """Connect and read a word; return whether there is one more connection that works."""
        connection = self._open(member, name, deadline)
        if connection is None:
            return False
        with self._lock:
            self._borrowed.add(connection)
            is_late = self._closed
        if is_late:
            self.discard(connection)
            return False
        word = np.zeros(1, np.uint64)
        worst = Status.PEER_LOST
        try:
            with self._transports[name].register_memory(
                word, word.ctypes.data, word.nbytes, readable=False
            ) as memory:
                spans = np.array([[0, 0, word.nbytes]], np.int64)
                transfer = connection.endpoint.read(memory, connection.remote, spans, words=None)
                worst = Status(int(transfer.wait(deadline - time.monotonic())[0]))
                if worst in UNUSABLE:
                    connection.endpoint.close()
        except TransportError as error:
            _log.warning("cannot read from peer %s over %s: %s", member.node_id, name, error)
        self.release(connection, worst, n_pages=0, nbytes=0, seconds=0.0)
        return worst not in UNUSABLE

    def _find(self, member: Member) -> tuple[Connection | None, list[str]]:
        """Return an idle connection, lent now, or the transports to try; neither for a peer to be let alone."""
        with self._lock:
            if self._closed:
                return None, []
            peer = self._peers.setdefault(member.node_id, _Peer(member))
            now = time.monotonic()
            if now < peer.avoid_until or member.state is not State.ALIVE:
                return None, []
            while peer.idle:
                connection = peer.idle.pop()
                if now >= peer.unusable.get(connection.transport, 0.0):
                    self._borrowed.add(connection)
                    return connection, []
            names = connecting(self.domains, member.transports)
            return None, [name for name in names if now >= peer.unusable.get(name, 0.0)]

    def _connect_by(self, member: Member, candidates: Sequence[str], deadline: float) -> Connection | None:
        began = time.monotonic()
        for name in candidates:
            connection = self._open(member, name, deadline)
            if connection is not None:
                with self._lock:
                    self._borrowed.add(connection)
                    is_late = self._closed
                if is_late:
                    self.discard(connection)
                    return None
                return connection
            if time.monotonic() >= deadline:
                if deadline - began >= FAIR_CHANCE_S:
                    self._avoid(member)
                    self._connect_between_calls(member, name)
                return None
            self._fall_back(member, name, "the handshake failed")
        return None

    def _open(self, member: Member, name: str, deadline: float) -> Connection | None:
        try:
            endpoint = self._transports[name].open()
        except TransportError as error:
            _log.warning("cannot reach peer %s over %s: %s", member.node_id, name, error)
            return None
        try:
            answer = self._connect(member, name, endpoint.describe(), deadline)
            if answer is not None:
                half, region = answer
                endpoint.bind(half)
                return Connection(member, name, endpoint, endpoint.attach(region))
        except TransportError as error:
            _log.warning("cannot reach peer %s over %s: %s", member.node_id, name, error)
        except BaseException:
            endpoint.close()
            raise
        endpoint.close()
        return None

    def release(
        self, connection: Connection, worst: Status, *, n_pages: int, nbytes: int, seconds: float
    ) -> None:
        """Give a connection back after its batch, with the worst that became of a span."""
        with self._lock:
            self._borrowed.discard(connection)
            peer = self._peers.get(connection.member.node_id)
            current = peer is not None and peer.member.boot_epoch == connection.member.boot_epoch
            if peer is not None and current:
                traffic = peer.traffic.setdefault(
                    connection.transport, PeerTraffic(connection.member.node_id, connection.transport)
                )
                traffic.n_pages += n_pages
                traffic.nbytes += nbytes
                traffic.seconds += seconds
                if worst not in UNUSABLE and not self._closed:
                    connection.has_read = True
                    if n_pages:
                        peer.n_failures.pop(connection.transport, None)
                    connection.idle_since = time.monotonic()
                    peer.idle.append(connection)
                    if self._sweeper is None:
                        self._sweep_later()
                    return
        connection.endpoint.close()
        if worst is Status.TIMED_OUT and seconds >= FAIR_CHANCE_S:
            self._avoid(connection.member)
            if not connection.has_read:
                self._connect_between_calls(connection.member, connection.transport)
        elif worst is Status.PEER_LOST and not connection.has_read:
            self._fall_back(connection.member, connection.transport, "the connection failed")

    def _sweep_later(self) -> None:
        """Have idle connections closed when their time has come. With the lock."""
        oldest = min((peer.idle[0].idle_since for peer in self._peers.values() if peer.idle), default=None)
        if not self._closed and oldest is not None:
            # a little later than the first: others that were given back with it are closed at the same time
            due = oldest + 1.1 * IDLE_S - time.monotonic()
            self._sweeper = threading.Timer(max(due, 0.1 * IDLE_S), self._sweep)
            self._sweeper.name = "p2pkv-idle"
            self._sweeper.daemon = True
            try:
                self._sweeper.start()
            except RuntimeError:  # no thread is to be had: the next connection that comes back tries again
                self._sweeper = None

    def _sweep(self) -> None:
        """Close what has been idle for long; those given back last are used first, so a burst's are at the front."""
        closing: list[Connection] = []
        with self._lock:
            until = time.monotonic() - IDLE_S
            for peer in self._peers.values():
                closing += [connection for connection in peer.idle if connection.idle_since <= until]
                peer.idle = [connection for connection in peer.idle if connection.idle_since > until]
        for connection in closing:
            connection.endpoint.close()
        with self._lock:  # not before, so that `close` waits for this thread
            self._sweeper = None
            self._sweep_later()

    def give_back(self, connection: Connection) -> None:
        """Give a lent connection back that was not used."""
        self.release(connection, Status.OK, n_pages=0, nbytes=0, seconds=0.0)

    def discard(self, connection: Connection) -> None:
        """Close a lent connection instead of giving it back: from now on nothing writes to local memory."""
        with self._lock:
            self._borrowed.discard(connection)
        connection.endpoint.close()

    def traffic(self) -> list[PeerTraffic]:
        """Return what was read from whom, over what."""
        with self._lock:
            return [traffic for peer in self._peers.values() for traffic in peer.traffic.values()]

    def _avoid(self, member: Member) -> None:
        with self._lock:
            if (peer := self._peers.get(member.node_id)) is not None:
                peer.avoid_until = time.monotonic() + AVOID_S

    def _fall_back(self, member: Member, name: str, why: str) -> None:
        with self._lock:
            peer = self._peers.get(member.node_id)
            if peer is None:
                return
            n_failures = peer.n_failures.get(name, 0)
            peer.n_failures[name] = n_failures + 1
            shortest, longest = RETRY_TRANSPORT_S
            peer.unusable[name] = time.monotonic() + min(longest, shortest * 2.0 ** min(n_failures, 10))
        self._metrics.transport_fallbacks.labels(name).inc()
        if n_failures == 0:
            _log.warning("peer %s is not reached over %s (%s); trying others", member.node_id, name, why)

    def interrupt(self) -> None:
        """Settle what is under way as ``CANCELED`` and lend nothing any more."""
        with self._lock:
            self._closed = True
            connections = list(self._borrowed)
        for connection in connections:
            connection.endpoint.close()

    def close(self) -> None:
        """Close every connection. Idempotent; the transports stay the caller's."""
        self.interrupt()
        with self._lock:
            connections = [connection for peer in self._peers.values() for connection in peer.idle]
            self._peers.clear()
            connecting = list(self._connecting)
            sweeper = self._sweeper
        if sweeper is not None:
            sweeper.cancel()
            sweeper.join()
        for thread in connecting:
            thread.join()  # the control client is closed by now, so that it waits for nobody
        for connection in connections:
            connection.endpoint.close()
