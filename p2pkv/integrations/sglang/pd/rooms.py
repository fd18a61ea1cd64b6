"""One request's transfer, at each of its ends: what prefill has offered of it, and what decode has granted for it.

The two safety rules live here. Decode's memory is written only while its :class:`Incoming` is open, and prefill's is
read only while its :class:`Outgoing` is: each server closes its own before SGLang gives the pages to another request,
and closing needs nothing from the other side.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from p2pkv.integrations.sglang.pd.rows import Spans
from p2pkv.offers.meeting import DEATH_GRACE_S
from p2pkv.transfers import RowStatus, RowStatuses

_PENDING = RowStatus.PENDING
_WORDS = {
    RowStatus.OUT_OF_RANGE: "differ from what was granted",
    RowStatus.REJECTED: "were withdrawn by prefill",
    RowStatus.CANCELED: "were canceled",
    RowStatus.PEER_LOST: "were lost with the other node, or with the way to it",
    RowStatus.TIMED_OUT: "did not come in time",
    RowStatus.DUPLICATE: "were sent twice",
    RowStatus.DEVICE_FAILED: "could not be copied from or to their device",
    RowStatus.GONE: "are offered no more",
}
"""As a person reads it in SGLang's log."""


_MEET_S = DEATH_GRACE_S
"""How long decode's node is waited for, until it is a member and connected to. One that was stopped is known to be back
only a second after it asks for KV again, and on a busy machine a first connection may take longer than that."""


class Offer(Protocol):
    """Rows that a peer may pull."""

    def done(self) -> bool: ...
    def statuses(self) -> RowStatuses: ...
    def withdraw(self) -> RowStatuses: ...


class Grant(Protocol):
    """Memory that rows are pulled into."""

    def done(self) -> bool: ...
    def statuses(self) -> RowStatuses: ...
    def revoke(self) -> RowStatuses: ...


class Putting(Protocol):
    """Prefill uses no more than this of ``node.transfers``."""

    def meet(self, node_id: str, *, timeout: float | None = None) -> bool: ...
    def put_async(self, node_id: str, request: str, spans: Spans, *, first_row: int = 0) -> Offer: ...


class MakeGrant(Protocol):
    """``node.transfers.grant``."""

    def __call__(
        self, request: str, spans: Spans, *, first_row: int = 0, timeout: float | None = None
    ) -> Grant: ...


class Progress(Enum):
    """Where a transfer is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


def flaw(statuses: RowStatuses) -> str | None:
    """Say what became of the rows that are not there, or None if all are."""
    if (statuses <= _PENDING).all():
        return None
    counts = Counter(RowStatus(int(s)) for s in statuses if s > _PENDING)
    told = ", ".join(f"{n} {_WORDS[status]}" for status, n in counts.most_common())
    return f"of {len(statuses)} pieces of KV {told}"


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a request is put to, and under which name."""

    node_id: str
    request: str


class Outgoing:
    """What prefill has offered of one request. Thread-safe.

    After :meth:`close` nothing of it can be pulled any more, whatever a thread was about to offer. ``_lock`` guards all
    fields; it is held while offering, so that closing waits for an offer being made: at most for the time that
    connecting to a node takes (1 s), and for none once the two are connected.
    """

    def __init__(self, transfers: Putting) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        self._is_complete = False
        self._is_closed = False
        self._failure: str | None = None

    def offer(self, target: Target, first_row: int, spans: Spans) -> None:
        """Offer rows to ``target``; blocks until its node is connected to. Does nothing once closed."""
        if not len(spans):
            return
        self._transfers.meet(target.node_id, timeout=_MEET_S)
        with self._lock:
            if self._is_closed or self._failure is not None:
                return
            offer = self._transfers.put_async(target.node_id, target.request, spans, first_row=first_row)
            self._offers.append(offer)

    def complete(self) -> None:
        """Say that everything is offered."""
        with self._lock:
            self._is_complete = True

    def fail(self, reason: str) -> None:
        """Give up, for the first reason given."""
        with self._lock:
            self._failure = self._failure or reason

    def progress(self) -> Progress:
        """Look where it is; never blocks."""
        if not self._lock.acquire(blocking=False):
            return Progress.PENDING  # an offer is being made
        try:
            pending = []
            for offer in self._offers:
                if not offer.done():
                    pending.append(offer)
                elif (reason := flaw(offer.statuses())) is not None:
                    self._failure = self._failure or reason
            self._offers = pending
            if self._failure is not None:
                return Progress.FAILED
            return Progress.DONE if self._is_complete and not pending else Progress.PENDING
        finally:
            self._lock.release()

    @property
    def failure(self) -> str | None:
        """Why it failed, or None."""
        with self._lock:
            return self._failure

    def close(self) -> None:
        """Withdraw what was not pulled: the memory is the caller's. Idempotent."""
        with self._lock:
            self._is_closed = True
            offers, self._offers = self._offers, []
            for offer in offers:
                offer.withdraw()


@dataclass(frozen=True, slots=True)
class Producer:
    """The prefill rank a request is expected from, in which boot; None: not in the view when it was asked."""

    node_id: str
    boot: int | None


class Incoming:
    """The memory decode has granted to one request. Thread-safe.

    After :meth:`close` nothing writes to that memory any more. ``_lock`` guards ``_grant`` and what follows it.
    """

    def __init__(self, name: str, bootstrap_addr: str, room: int) -> None:
        self.name = name
        self.bootstrap_addr = bootstrap_addr
        self.room = room
        self.producers: tuple[Producer, ...] = ()
        self.layers: tuple[int, ...] = ()
        """How many layers each of prefill's stages has; empty where it has one stage."""
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._grant: Grant | None = None
        self._failure: str | None = None
        self._is_closed = False

    def grant(self, make: MakeGrant, spans: Spans, *, timeout: float) -> None:
        """Let the rows of this request be written to ``spans``."""
        grant = make(self.name, spans, timeout=timeout)
        with self._lock:
            self._grant = grant

    def progress(self) -> Progress:
        """Look where it is; never blocks."""
        with self._lock:
            if self._failure is None and self._grant is not None:
                if not self._grant.done():
                    return Progress.PENDING
                self._failure = flaw(self._grant.statuses())
                if self._failure is None:
                    return Progress.DONE
            return Progress.FAILED

    @property
    def failure(self) -> str | None:
        """Why it failed, or None."""
        with self._lock:
            return self._failure

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be written any more."""
        with self._lock:
            return self._is_closed

    def close(self) -> None:
        """Revoke: what was not there by now never comes. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._grant is not None:
                self._grant.revoke()
            self._grant = None


class Absences:
    """Since when producers are no members, for those who look again and again. Of one thread alone."""

    def __init__(self, grace: float = DEATH_GRACE_S) -> None:
        """``grace``: seconds; whoever is back within them was only taken for dead, by or on a busy machine."""
        self._grace = grace
        self._since: dict[Producer, float] = {}

    def gone(
        self, producers: Iterable[Producer], present: Callable[[str], int | None], now: float
    ) -> set[Producer]:
        """Return those that are members only in a later boot, or have been none for longer than the grace."""
        boots = {producer: present(producer.node_id) for producer in producers if producer.boot is not None}
        self._since = {
            producer: self._since.get(producer, now) for producer, boot in boots.items() if boot is None
        }
        restarted = {producer for producer, boot in boots.items() if boot not in (None, producer.boot)}
        return restarted | {p for p, since in self._since.items() if now - since >= self._grace}


def unmet(producers: Sequence[Producer]) -> str | None:
    """Return the id of a producer that was never seen in the cluster, or None."""
    return next((producer.node_id for producer in producers if producer.boot is None), None)
