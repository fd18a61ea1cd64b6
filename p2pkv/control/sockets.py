"""The control plane: small authenticated messages between nodes, over ZMQ with CURVE.

The server's socket is made and secured here and then served by a native thread (``_native.ControlLoop``), so that
peers are answered while this interpreter is busy. The client side runs in the calling thread: every request borrows a
socket of its own, so a call waits for its own peer only, and one that was not answered throws its socket away.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import zmq

from p2pkv import _native
from p2pkv.address import (
    can_listen_on,
    is_loopback,
    leads_to_loopback,
    require_public,
    split_address,
)
from p2pkv.control.admission import Admission
from p2pkv.control.host_names import Names
from p2pkv.control.idle_lines import IdleLines, Line
from p2pkv.control.listening import IsPeer, bind
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.wire import MAX_MESSAGE, Kind, Reply, pack_request, unpack_reply
from p2pkv.errors import ClosedError, ControlError, VersionError
from p2pkv.limited_log import LimitedLog

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_ZAP_DOMAIN = "p2pkv"
_HEARTBEAT_MS = 5000
_REPLIES_QUEUED = 64
"""For a peer that does not read; what comes after is dropped and runs into that peer's deadline."""
GLANCE_MS = 10
"""How often a call that waits looks whether its client was closed. A lone request waits so long in ``recv`` itself,
which saves the wake-ups of a poll."""
_RECONNECT_MS = 500
"""How long ZMQ waits at most before it knocks again where nobody lets it in; it begins with its own 100 ms."""
_SILENT_S = 0.1
"""Who was waited for no longer than that, as an owner of entries beside others, may only be slow."""
_ANSWERS_QUEUED = 4
"""One socket has so many, of up to 1 MiB each; a peer that sends without being asked is read no further. With ZMQ's
default, 1,000, it would take a GiB of this process's memory, a tenant's member that of the cluster around as well."""
MAX_SOCKETS = 16384
"""Of a node's ZMQ context. ZMQ's own default, 1023, is less than a large cluster has members, each of which is probed
over a socket of its own."""
_NAMES_S = 2.0
"""How long a start waits for the name it is to listen on."""

Socket = zmq.Socket[bytes]


def _nobody(address: str) -> bool:
    return False


class ControlServer:
    """A node's control socket. Strangers without the cluster's key are not admitted.

    The native thread runs from :meth:`start` to :meth:`close`. ``loop`` is the native side: what it answers by itself
    and what it queues for Python is in ``native/src/control/control_loop.h``.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        keys: ClusterKeys,
        listen: str,
        shard: _native.Shard,
        epochs: _native.NamespaceEpochs | None = None,
        *,
        join: Sequence[str] = (),
        names: Names | None = None,
        is_peer: IsPeer = _nobody,
    ) -> None:
        """Bind ``listen``, which may be left to another node that ``is_peer``: see :func:`.listening.bind`."""
        self._names = names or Names()
        self._also: list[str] = []
        self._admission = Admission(context, keys, _ZAP_DOMAIN)
        self._socket = context.socket(zmq.ROUTER)
        with ExitStack() as undo:
            undo.callback(self._admission.close)
            self._admission.guard(self._socket, max_message=MAX_MESSAGE)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self._socket.setsockopt(zmq.SNDHWM, _REPLIES_QUEUED)
            self._names.wait_for([listen], _NAMES_S)
            require_public("listen", listen, self._names.numbers(listen))
            self.address = bind(self._socket, listen, join, names=self._names, is_peer=is_peer)
            undo.pop_all()
        self.loop = _native.ControlLoop(self._socket, shard, epochs or _native.NamespaceEpochs())

    def start(self) -> None:
        """Begin to answer."""
        self.loop.start()

    def resolve(self, address: str) -> list[str]:
        """Return the numbers that an address by name stands for, as other machines would find them."""
        host, port = split_address("address", address)
        own, _ = split_address("address", self.address)
        found = self._names.numbers(address)
        if is_loopback(host) or is_loopback(own):
            return found
        # A host's own name often leads to its loopback there, and nowhere else: Debian's installer writes 127.0.1.1
        # into /etc/hosts. What others find under that name is this host's address.
        ours = f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
        return list(dict.fromkeys(ours if leads_to_loopback(number) else number for number in found))

    def listen_also(self, address: str) -> bool:
        """Bind a second address; False if it isn't this host's or is taken. Blocks for the native thread only."""
        numeric = self._names.numeric(address)
        # libzmq ends the whole process if it has no descriptor left to look the host's addresses up with
        if numeric is None or not can_listen_on(numeric) or self.loop.bind(f"tcp://{numeric}") != 0:
            return False
        self._also.append(numeric)
        return True

    def listen_no_more(self) -> None:
        """Give up the addresses of :meth:`listen_also`, so that others can have them. Blocks as that does."""
        while self._also:
            self.loop.unbind(f"tcp://{self._also.pop()}")

    def stop_admitting(self) -> None:
        """Stop the ZAP handler: from now on no new connection is admitted, with or without the secret."""
        self._admission.stop()

    @property
    def refused(self) -> int:
        """How many connections had a wrong key, or none."""
        return self._admission.n_refused

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self.loop.stop()
        self._admission.close()


@dataclass(frozen=True, slots=True)
class Request:
    """One message to one peer; ``boot`` is the boot epoch it is meant for, 0 for any.

    ``n_holders``: how many of a page a LOCATE asks for.
    """

    address: str
    kind: Kind
    body: bytes = b""
    count: int = 1
    boot: int = 0
    n_holders: int = 0


class ControlClient:
    """Asks peers. Thread-safe; blocks in :meth:`Calls.next` only, and never past what that is given."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        keys: ClusterKeys,
        names: Names | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names or Names()
        self._context = context
        self._keys = keys
        self._now = now
        # guards _idle and is_closed; reentrant, since a signal's handler may close the node wherever a thread is
        self._lock = threading.RLock()
        self._idle = IdleLines(now)
        # The keys that a server has answered by, by its address; kept only where it may go by several. Guarded too.
        self._proven: dict[str, ClusterKeys] = {}
        self.is_closed = False
        """Whether calls are to end."""
        self._request_ids = count(1)
        self.log = LimitedLog(_log)
        """It says what goes wrong with peers' answers."""

    def send(self, requests: Sequence[Request]) -> Calls:
        """Send every request at once. Use the result in a ``with`` statement."""
        return Calls(self, requests)

    def ask(self, request: Request, timeout: float) -> Reply | None:
        """Send one request and wait for its reply; None if there is none within ``timeout`` seconds."""
        with self.send([request]) as calls:
            for _, reply in calls.replies(timeout):
                return reply
        return None

    def forget(self, address: str) -> None:
        """Close the idle sockets to a peer that is gone."""
        with self._lock:
            lines = self._idle.forget(address)
            self._proven.pop(address, None)
        for line in lines:
            line.socket.close()

    def close(self) -> None:
        """Close idle sockets. Calls under way end with :class:`ClosedError` within :data:`GLANCE_MS`."""
        with self._lock:
            self.is_closed = True
            lines = self._idle.forget_all()
        for line in lines:
            line.socket.close()

    @property
    def n_secrets(self) -> int:
        """By how many a peer may go."""
        return len(self._keys.all)

    def has_idle(self, address: str) -> bool:
        """Whether there is a line to a peer by which nothing is asked."""
        with self._lock:
            return self._idle.has(address)

    def next_id(self) -> int:
        """Return the number of another request."""
        return next(self._request_ids)

    def borrow(self, address: str) -> list[Line]:
        """Return sockets to a peer, of which one at most leads to it: it goes by one of several secrets.

        None of them if nobody can have this address, or its name is not known yet, or this process can't have another
        socket.
        """
        with self._lock:
            if self.is_closed:
                raise ClosedError("the node is closed")
            if (idle := self._idle.take(address)) is not None:
                return [idle]
            proven = self._proven.get(address)
        if (numeric := self._names.numeric(address)) is None:
            return []
        lines: list[Line] = []
        try:
            for keys in self._keys.all if proven is None else (proven,):
                lines.append(Line(self._connect(numeric, keys), keys))
        except zmq.ZMQError as error:
            for line in lines:
                line.socket.close()
            if self.is_closed or isinstance(error, zmq.ContextTerminated):
                raise ClosedError("the node is closed") from error
            self._complain(address, error)
            return []
        return lines

    def _complain(self, address: str, error: zmq.ZMQError) -> None:
        advice = "; raise RLIMIT_NOFILE (ulimit -n 65536)" if error.errno == errno.EMFILE else ""
        message = "cannot ask %s, as if it were silent: %s%s"
        self.log.warning(error.errno, message, address, error.strerror, advice)

    def _connect(self, address: str, keys: ClusterKeys) -> Socket:
        socket = self._context.socket(zmq.DEALER)
        with ExitStack() as undo:
            undo.callback(socket.close)
            socket.linger = 0
            socket.rcvtimeo = GLANCE_MS
            socket.curve_serverkey = keys.public
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.private
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            socket.rcvhwm = _ANSWERS_QUEUED
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            socket.connect(f"tcp://{address}")
            undo.pop_all()
        return socket

    def give_back(self, address: str, line: Line) -> None:
        """Take a line that has answered, and by which nothing is asked, for the next request."""
        to_close = [line]
        with self._lock:
            if not self.is_closed:
                if self._keys.accepted:
                    self._proven[address] = line.keys
                if self._idle.keep(address, line):
                    to_close = []
            unused, empty = self._idle.take_unused()
            for each in empty:
                self._proven.pop(each, None)
        for old in (*to_close, *unused):
            old.socket.close()

    def doubt(self, address: str) -> None:
        """Find out anew by which secret it goes, if there are several: it may have been started again with another."""
        if self._keys.accepted:
            self.forget(address)

    def note_silent(self, address: str) -> None:
        """Take notice that nobody has answered there in time: its name may stand for another host by now."""
        self._names.doubt(address)


class Calls:
    """Requests under way. Used by one thread; leaving the ``with`` block gives up those not answered.

    A request that could not be sent is one that nobody answers.
    """

    def __init__(self, client: ControlClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._began = client._now()
        self._requests = list(requests)
        self._pending: dict[
            Socket, tuple[int, int, Line]
        ] = {}  # socket -> (index, request id, what it is of)
        with ExitStack() as undo:
            undo.callback(self.close)
            for index, request in enumerate(requests):
                self._send(index, request)
            undo.pop_all()

    def _send(self, index: int, request: Request) -> None:
        request_id = self._client.next_id()
        lines = self._client.borrow(request.address)
        if not lines:
            return
        message = pack_request(
            request.kind,
            request_id,
            boot=request.boot,
            count=request.count,
            body=request.body,
            n_holders=request.n_holders,
        )
        for line in lines:
            self._pending[line.socket] = (index, request_id, line)
            line.socket.send(message, zmq.DONTWAIT)

    def next(self, timeout: float) -> tuple[int, Reply] | None:
        """Return the index of a request and its reply; None after ``timeout`` seconds or when all are answered.

        A peer that answers nonsense counts as one that does not answer. Raises :class:`ClosedError`.
        """
        until = time.monotonic() + timeout
        while self._pending:
            left = until - time.monotonic()
            if self._client.is_closed:
                raise ClosedError("the node is closed")
            try:
                waiting = list(self._pending)
                wait_ms = max(0, min(math.ceil(left * 1000), GLANCE_MS))
                may_block = len(waiting) == 1 and wait_ms == GLANCE_MS
                if not may_block:
                    zmq.zmq_poll([(socket, zmq.POLLIN) for socket in waiting], wait_ms)
                for socket in waiting:
                    if (answer := self._receive(socket, 0 if may_block else zmq.DONTWAIT)) is not None:
                        return answer
            except zmq.ContextTerminated as error:
                raise ClosedError("the node is closed") from error
            if left <= 0:
                return None
        return None

    def are_pending(self) -> bool:
        """Whether some request may still be answered."""
        return bool(self._pending)

    def ask_instead(self, index: int, request: Request) -> None:
        """Send another request in the place of one that was answered."""
        self._requests[index] = request
        self._send(index, request)

    def replies(self, timeout: float) -> Iterator[tuple[int, Reply]]:
        """Yield replies as they come, for at most ``timeout`` seconds in all."""
        until = time.monotonic() + timeout
        while (answer := self.next(until - time.monotonic())) is not None:
            yield answer

    def _receive(self, socket: Socket, flags: int) -> tuple[int, Reply] | None:
        if socket not in self._pending:
            return None  # another one had the answer, or nonsense
        index, request_id, line = self._pending[socket]
        request = self._requests[index]
        try:
            reply = unpack_reply(socket.recv(flags), request.kind, request_id)
        except zmq.Again:
            return None
        except (ControlError, VersionError) as error:
            message = "peer %s gave an answer that can't be used: %s"
            self._client.log.warning(request.address, message, request.address, error)
            self._let_go(socket, index)
            socket.close()
            return None
        if reply is None:
            return None
        self._let_go(socket, index)
        self._client.give_back(request.address, line)
        return index, reply

    def _let_go(self, socket: Socket, index: int) -> None:
        """Wait no more for this socket, and close those by which the same request went nowhere."""
        del self._pending[socket]
        if not self._client._keys.accepted:
            return
        for other in [other for other, (of, _, _) in self._pending.items() if of == index]:
            del self._pending[other]
            other.close()

    def close(self) -> None:
        """Give up what is not answered: a late reply must not meet the socket's next request."""
        for socket in self._pending:
            socket.close()
        is_silent = self._client._now() >= self._began + _SILENT_S
        for index in {index for index, _, _ in self._pending.values()}:
            if is_silent:
                self._client.note_silent(self._requests[index].address)
            self._client.doubt(self._requests[index].address)
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
