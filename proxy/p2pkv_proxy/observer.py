"""Look-ups in the cluster's directory from outside: the router is no member, so it owns no entries and moves none.

It asks a member for the cluster's view every second, and the owners of a page's entry as any reader does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import zmq

from p2pkv import _native
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind, pack_connect, unpack_connected, unpack_epochs
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member, View
from p2pkv.errors import ClosedError, ControlError, TransportError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import RESIDENT, Keys, as_locations
from p2pkv_proxy.held import Place
from p2pkv_proxy.lookout import Lookout

_log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_ANSWER_S = 1.0
_REPLICAS = 2
_NOBODY = 0
"""A node key that no node has: the router has no shard."""


class DirectoryObserver:
    """Thread-safe. A thread of its own keeps the view from the start until :meth:`close`."""

    def __init__(self, join: Sequence[str], keys: ClusterKeys, *, replicas: int = _REPLICAS) -> None:
        self._log = LimitedLog(_log)
        self.epochs = _native.NamespaceEpochs()
        """It holds what the nodes know of the epochs of all namespaces."""
        self.has_view = False
        """Whether the cluster could be asked lately."""
        with ExitStack() as undo:
            context: zmq.Context[Socket] = zmq.Context()
            undo.callback(context.term)
            self._client = ControlClient(context, keys)
            undo.callback(self._client.close)
            self._lookout = Lookout(join, self._client)
            channels = DirectoryChannels(self._connect, lambda: self._directory.ring.seated)
            undo.callback(channels.close)
            self._directory = DirectoryClient(
                own_key=_NOBODY,
                shard=_native.Shard(1024),
                client=self._client,
                channels=channels,
                replicas=replicas,
                metrics=Metrics(),
            )
            self._view = View()
            self._closing = threading.Event()
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._watch, name="p2pkv-observer", daemon=True)
        self._thread.start()

    def places(self, keys: Keys, timeout: float) -> list[Place | None]:
        """Return for each key where its page lies, None where that is nowhere. Blocks ``timeout`` seconds at most."""
        found, raw = self._directory.get(keys, time.monotonic() + timeout)
        names = self._view
        ids: dict[int, str | None] = {}
        places: list[Place | None] = []
        locations = as_locations(raw)
        rows = zip(found.tolist(), locations["owner"].tolist(), locations["flags"].tolist(), strict=True)
        for is_there, owner, flags in rows:
            if is_there and owner not in ids:
                member = names.by_key(owner)
                ids[owner] = member.node_id if member is not None else None
            node_id = ids[owner] if is_there else None
            places.append(Place(node_id, not flags & RESIDENT) if node_id is not None else None)
        return places

    def close(self) -> None:
        """Stop asking. Idempotent; calls under way end."""
        self._closing.set()
        self._client.close()
        self._thread.join()
        self._undo.close()

    def _connect(self, member: Member, name: str, half: bytes, deadline: float) -> tuple[bytes, bytes] | None:
        request = Request(member.address, Kind.CONNECT, pack_connect(name, half), boot=member.boot_epoch)
        reply = self._client.ask(request, max(0.0, deadline - time.monotonic()))
        if reply is None or not reply.ok:
            return None
        try:
            return unpack_connected(reply.body)
        except ControlError as error:
            raise TransportError(f"peer {member.node_id}: {error}") from error

    def _watch(self) -> None:
        while True:
            try:
                self._refresh()
            except ClosedError:
                return
            if self._closing.wait(_REFRESH_S):
                return

    def _refresh(self) -> None:
        address = self._lookout.look()
        if address is not None:
            self._take(self._lookout.view)
            self._learn(address)
            return
        if self.has_view:
            _log.warning("no p2pkv node answers; what it holds is not known any more")
        self.has_view = False

    def _learn(self, address: str) -> None:
        """Ask for the epochs: keys are hashed with them."""
        reply = self._client.ask(Request(address, Kind.EPOCHS, count=0), _ANSWER_S)
        if reply is not None and reply.ok:  # else it is a p2pkv that has none
            try:
                self.epochs.raise_to(unpack_epochs(reply.body, reply.count))
            except (ControlError, ValueError) as error:
                self._log.warning(address, "the epochs of %s can't be read: %s", address, error)

    def _take(self, view: View) -> None:
        if not self.has_view or view.digest != self._view.digest:
            _log.info("the directory has %d nodes", len(view.present()))
            self._directory.set_view(view)
            self._view = view
        self.has_view = True
