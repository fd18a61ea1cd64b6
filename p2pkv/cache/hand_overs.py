"""Hand-overs: a node asks another, by name, to prefetch pages that it has. Bytes move by pull as always."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2pkv import _native
from p2pkv.cache.prefetcher import Prefetcher
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import MAX_ENTRIES, U32, Kind, ReplyStatus
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import KEY_BYTES, Keys, Namespace
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TAKE_S = 60.0
"""How long the thread sleeps at most when nobody asks; closing wakes it."""
_PREFETCH_S = 60.0
"""How long what was handed over may take."""
_ANOTHER_NAMESPACE = "its pages are of another namespace, or of another epoch of it"
_CLOSING = "it is being closed"
_TOO_MANY = "as many prefetches wait there as it takes"


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a node has answered to a hand-over."""

    n_accepted: int
    """So many pages it will try to bring into its pool."""
    n_absent: int
    """So many were not handed over, because this node does not have them."""
    refusal: str
    """Why it took no more, in a few words; empty if it took all that there was."""


class HandOvers(Resource):
    """Asks others, and answers them in a thread that runs from construction to :meth:`close`."""

    def __init__(
        self,
        loop: _native.ControlLoop,
        client: ControlClient,
        namespace: Namespace,
        prefetcher: Prefetcher,
        epoch: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        """``epoch`` returns that of this node's namespace."""
        self._loop = loop
        self._client = client
        self._namespace = namespace
        self._prefetcher = prefetcher
        self._epoch = epoch
        self._metrics = metrics
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-hand-over", daemon=True)
        self._thread.start()

    def ask(self, member: Member, ids: Keys, prefix: bytes, deadline: float) -> tuple[int, str]:
        """Hand pages over that were hashed with ``prefix``; return how many were accepted, and why no more."""
        n_accepted, refusal = 0, ""
        for first in range(0, len(ids), MAX_ENTRIES):
            batch = ids[first : first + MAX_ENTRIES]
            body = prefix + batch.tobytes()
            request = Request(member.address, Kind.HAND_OVER, body, count=len(batch), boot=member.boot_epoch)
            reply = self._client.ask(request, max(0.0, deadline - time.monotonic()))
            if reply is not None and reply.ok and len(reply.body) == U32.size:
                n_accepted += U32.unpack(reply.body)[0]
                continue
            if reply is None:
                refusal = "it did not answer in time"
            elif reply.status is ReplyStatus.MALFORMED:
                refusal = "its p2pkv knows no hand-overs; upgrade it"
            else:
                refusal = reply.body.decode(errors="replace") or f"it answered {reply.status.name}"
            break
        self._metrics.count(self._metrics.handed_over_pages, "accepted", n_accepted)
        self._metrics.count(self._metrics.handed_over_pages, "refused", len(ids) - n_accepted)
        return n_accepted, refusal

    def _run(self) -> None:
        while not self._closing.is_set():
            event = self._loop.take(Kind.HAND_OVER, _TAKE_S)
            if event is None:
                continue
            route, body = event
            try:
                refusal = self._take(body)
            except ClosedError:
                refusal = _CLOSING
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop: the next one is another
                self._log.error(type(error).__name__, "pages handed over were not taken", exc_info=error)
                refusal = f"it failed: {type(error).__name__}"
            if refusal:
                self._loop.reply(route, ReplyStatus.REFUSED, refusal.encode())
            else:
                self._loop.reply(route, ReplyStatus.OK, U32.pack(len(body) // KEY_BYTES - 1))

    def _take(self, body: bytes) -> str:
        """Begin to bring what is handed over; return why not, if not."""
        n_pages, rest = divmod(len(body) - KEY_BYTES, KEY_BYTES)
        if rest or not 0 < n_pages <= MAX_ENTRIES:
            return "a hand-over of a wrong length"
        epoch = self._epoch()  # before the prefix: a bump between the two is noticed when pages are stored
        if body[:KEY_BYTES] != self._namespace.prefix:
            return _ANOTHER_NAMESPACE
        ids = np.frombuffer(body, np.uint8, offset=KEY_BYTES).reshape(n_pages, KEY_BYTES)
        if _native.find_duplicate(ids) is not None:
            ids = np.ascontiguousarray(np.unique(ids, axis=0))
        prefetch = self._prefetcher.submit(ids, epoch, time.monotonic() + _PREFETCH_S)
        return _TOO_MANY if prefetch.is_refused else ""

    def close(self) -> None:
        """Answer no more; waits for the thread. Idempotent."""
        self._closing.set()
        self._loop.wake(Kind.HAND_OVER)
        self._thread.join()
