"""Telling the cluster's nodes where this router takes heartbeats, so that nobody has to name it to engines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import zmq

from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.routers import pack_news
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError
from p2pkv_proxy.lookout import Lookout

_log = logging.getLogger(__name__)
_EVERY_S = 3.0
"""Between two rounds: a heartbeat's time."""
_MOST_A_ROUND = 256
"""Members that are told in one round; where there are more they take turns."""
_LASTS_ROUNDS = 5
"""A node goes on with what it was told for so many of its turns."""
_ANSWER_S = 1.0


class Presence:
    """Tells all members, from a thread of its own, from the start until :meth:`close`."""

    def __init__(self, join: Sequence[str], keys: ClusterKeys, address: str) -> None:
        """``address``: where heartbeats are taken, as engines reach it."""
        self._address = address
        self._next = 0
        with ExitStack() as undo:
            context: zmq.Context[Socket] = zmq.Context()
            undo.callback(context.term)
            self._client = ControlClient(context, keys)
            undo.callback(self._client.close)
            self._undo = undo.pop_all()
        self._lookout = Lookout(join, self._client)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-presence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        n_told = 0
        while not self._closing.is_set():
            try:
                found = self._lookout.look()
                n_now = self._tell() if found is not None else 0
            except ClosedError:
                return
            if bool(n_now) != bool(n_told):
                _log.info("%d p2pkv nodes know of heartbeats at %s", n_now, self._address)
            n_told = n_now
            self._closing.wait(_EVERY_S)

    def _tell(self) -> int:
        """Tell those whose turn it is; return how many have answered."""
        members = sorted(self._lookout.view.alive(), key=lambda member: member.node_id)
        n_rounds = max(1, -(-len(members) // _MOST_A_ROUND))
        news = pack_news(self._address, _LASTS_ROUNDS * n_rounds * _EVERY_S)
        turn = self._turn(members)
        with self._client.send([Request(member.address, Kind.GOSSIP, news) for member in turn]) as calls:
            return sum(reply.ok for _, reply in calls.replies(_ANSWER_S))

    def _turn(self, members: list[Member]) -> list[Member]:
        if len(members) <= _MOST_A_ROUND:
            return members
        first = self._next % len(members)
        self._next = first + _MOST_A_ROUND
        return (members + members)[first : first + _MOST_A_ROUND]

    def close(self) -> None:
        """Tell nobody any more; nodes forget this router in time. Idempotent."""
        self._closing.set()
        self._client.close()
        self._thread.join()
        self._undo.close()
