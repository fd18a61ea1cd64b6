"""Reading peers' memory: what the native peer layer is told, and the handshakes that it asks for.

Fetches of pages and pulls of offers borrow their connections there. A pull opens what it needs over its link, without
this module; it is told here as well when a transport did not lead to a peer.

Which transport leads to whom, idle connections, who is let alone for a while and what is tried next is native
(``native/src/peers/peer_connections.h``): a call whose connections are there runs nothing of this module. Opening one
is rare, and is done here, for the handshake goes over the control plane.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from p2pkv import _native
from p2pkv.directory.view import Member, State, View
from p2pkv.errors import ClosedError, TransportError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.transports import connecting, unequal_encryption
from p2pkv.transports.base import MemoryRegion, Resource, Transport
from p2pkv.transports.native import for_core, region_for_core

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

Connect = Callable[[Member, str, bytes, float], "tuple[bytes, bytes] | None"]
"""``(member, transport, our half, deadline)`` to the peer's half and its region's description; None: no answer or
refused. The control plane's part of a handshake."""


@dataclass(slots=True)
class PeerTraffic:
    """What this node has read of one peer's pages."""

    node_id: str
    transport: str
    n_pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    """How long these reads took, those that failed or were late included."""
    n_late: int = 0
    """Reads that were left for another holder of their pages, because this one took too long."""


class PeerConnections(Resource):
    """Thread-safe. ``native`` is what fetches and pulls read with."""

    def __init__(self, transports: Sequence[Transport], connect: Connect, metrics: Metrics) -> None:
        by_name = {transport.name: transport for transport in transports}
        self._opener = _Opener(list(by_name.values()), connect, metrics)
        self.domains = {transport.name: transport.domain for transport in by_name.values()}
        """Name to domain of every transport, in order of preference."""
        self.numbers = {name: number for number, name in enumerate(self.domains)}
        """What the native layer calls each transport."""
        self._log = LimitedLog(_log)
        self._lock = threading.RLock()  # held while the view changes
        first, most = RETRY_TRANSPORT_S
        self.native = _native.PeerConnections.start(
            # weak: the garbage collector does not see through the core, and would find no way to a closed node
            weakref.proxy(self._opener),
            len(by_name),
            avoid=AVOID_S,
            fair_chance=FAIR_CHANCE_S,
            patient_connect=PATIENT_CONNECT_S,
            retry_first=first,
            retry_most=most,
            idle=IDLE_S,
        )

    def set_view(self, view: View) -> None:
        """Know the members of ``view``; drop the connections to nodes that are gone or were restarted."""
        with self._lock:
            old, self._opener.view = self._opener.view, view
            changed = [self._record(m) for m in view.values() if m.is_present and old.get(m.node_id) is not m]
            gone = [
                member.key
                for member in old.values()
                if member.is_present and ((now := view.get(member.node_id)) is None or not now.is_present)
            ]
            self.native.change(changed, gone)

    def _record(self, member: Member) -> tuple[int, int, bool, list[int]]:
        """Return what the native layer knows of a member: who it is, and the transports that lead to it, best first."""
        ways = [self.numbers[name] for name in connecting(self.domains, member.transports)]
        for name, ours, theirs in unequal_encryption(self.domains, member.transports):
            self._log.warning(
                (member.node_id, name),
                "peer %s is not read over %s, nor reads here: its end is '%s' and this one '%s'; "
                "set encrypt to the same on both",
                member.node_id,
                name,
                theirs,
                ours,
            )
        return member.key, member.boot_epoch, member.state is State.ALIVE, ways

    def traffic(self) -> list[PeerTraffic]:
        """Return what was read from whom, over what."""
        names, view = list(self.domains), self._opener.view
        return [
            PeerTraffic(member.node_id, names[way], n_pages, nbytes, seconds, n_late)
            for key, way, n_pages, nbytes, seconds, n_late in self.native.traffic()
            if (member := view.by_key(key)) is not None
        ]

    def interrupt(self) -> None:
        """Settle what is under way as ``CANCELED`` and lend nothing any more."""
        self.native.interrupt()

    def close(self) -> None:
        """Close every connection. Idempotent; the transports stay the caller's."""
        self.native.close()  # its threads end soon: the control client is closed by now, so that they wait for nobody
        self._opener.close()


class _FallBack(IntEnum):
    """Why a transport did not lead to a peer; mirrors ``PeerConnections::FallBack``."""

    HANDSHAKE_FAILED = 0
    CONNECTION_FAILED = 1
    MEMORY_OUT_OF_REACH = 2

    def __str__(self) -> str:
        return "the handshake failed" if self is _FallBack.HANDSHAKE_FAILED else "the connection failed"


class _Opener:
    """What the native layer calls, on any thread: handshakes, and what is to be logged and counted.

    Peers are named by key and boot epoch, transports by their number.
    """

    def __init__(self, transports: Sequence[Transport], connect: Connect, metrics: Metrics) -> None:
        self.view = View()
        self._transports = transports
        self._connect = connect
        self._metrics = metrics
        self._log = LimitedLog(_log)
        self._lock = threading.Lock()  # guards the next one
        self._scratch: dict[int, MemoryRegion] = {}

    def open(self, key: int, boot: int, way: int, timeout: float) -> tuple[object, object] | None:
        """Open a connection to a peer: the endpoint, and the peer's region that it is attached to.

        None if there was no answer within ``timeout`` seconds, or what was wrong is logged.
        """
        member = self.view.by_key(key)
        if member is None or member.boot_epoch != boot:
            return None
        transport = self._transports[way]
        deadline = time.monotonic() + timeout
        try:
            endpoint = transport.open()
        except TransportError as error:
            self._complain(member, transport, error)
            return None
        with ExitStack() as undo:
            undo.callback(endpoint.close)
            try:
                answer = self._connect(member, transport.name, endpoint.describe(), deadline)
                if answer is not None:
                    half, region = answer
                    endpoint.bind(half)
                    opened = for_core(endpoint, endpoint.attach(region))
                    undo.pop_all()
                    return opened
            except TransportError as error:
                self._complain(member, transport, error)
        return None

    def scratch(self, way: int) -> object | None:
        """Return memory that a test read over a transport may overwrite; None if it can't be registered."""
        transport = self._transports[way]
        with self._lock:
            if way not in self._scratch:
                word = np.zeros(1, np.uint64)
                try:
                    self._scratch[way] = transport.register_memory(
                        word, word.ctypes.data, word.nbytes, readable=False
                    )
                except TransportError as error:
                    self._log.warning(way, "cannot test connections over %s: %s", transport.name, error)
                    return None
            return region_for_core(transport, self._scratch[way])

    def fell_back(self, key: int, way: int, why: int, is_first: bool) -> None:
        """Count that a transport did not lead to a peer, and log it the first time."""
        transport, member = self._transports[way], self.view.by_key(key)
        name = transport.name
        self._metrics.transport_fallbacks.labels(name).inc()
        if member is None or not is_first:
            return
        message, cause = "peer %s is not reached over %s (%s); trying others", str(_FallBack(why))
        if why == _FallBack.MEMORY_OUT_OF_REACH:
            message = "device memory of peer %s is not reached over %s (%s); its rows go through host memory"
            cause = transport.refusal()
        self._log.warning((member.node_id, name, why), message, member.node_id, name, cause)

    def failed(self, error: BaseException) -> None:
        """Log an exception of :meth:`open` or of a transport that no call waits for."""
        if not isinstance(error, ClosedError):
            self._log.error(type(error).__name__, "a connection between calls was not made", exc_info=error)

    def _complain(self, member: Member, transport: Transport, error: TransportError) -> None:
        cause = (member.node_id, transport.name)
        self._log.warning(cause, "cannot reach peer %s over %s: %s", member.node_id, transport.name, error)

    def close(self) -> None:
        """Release the memory for test reads. Idempotent."""
        with self._lock:
            for region in self._scratch.values():
                region.close()
