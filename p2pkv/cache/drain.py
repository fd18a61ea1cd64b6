"""How a node that is about to leave hands its pages over to others, who then own them.

It stores no more of what is published, and is no part of the directory's ring any more; it goes on serving what it has.
The others bring its pages as guests (:mod:`p2pkv.cache.take_overs`), those that were used last first: into free room
to begin with, then in the place of a bounded share of what they have. In the end it lets go of them: from then on it
takes nothing back, and they are pages of those who have them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from p2pkv.cache.departures import Departures
from p2pkv.cache.drain_receiver import CANT_READ, LATE, OPEN, TAKEN, Receiver, refusal_of, why_left
from p2pkv.cache.drain_work import LISTED, USE, Work
from p2pkv.cache.drained import Drained, sentence
from p2pkv.cache.guests import Followers, TakingBack
from p2pkv.cache.prefetch import PrefetchOutcome
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import TAKE_OVER, TAKE_OVER_ENTRY, U64, Kind
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Namespace
from p2pkv.pool import Pool

_log = logging.getLogger(__name__)

_AT_ONCE = 8
"""So many nodes take pages over at the same time."""
_ASK_S = 1.0
_MOST_ASKED = 64
"""So often those are asked again who don't answer; where that costs no time, since nothing can be sent, it must end."""
_ANSWER_S = 5.0
"""What a batch may take; who has not answered by then is asked no more."""
_ITS_SHARE = 0.9
"""Of that time what the other node is told that it has; the rest is for its answer's way."""
_LET_GO_SHARE, _LET_GO_S = 0.2, 1.0
"""Of the time, and at most: what is kept for letting go in the end."""
_RETURN_SHARE, _RETURN_S = 0.1, 2.0
"""Likewise: how long those who left a moment ago are waited for. A view that has changed goes round in a second."""


class Drainer:
    """Thread-safe. Drains once; who asks again waits for that."""

    def __init__(
        self,
        *,
        pool: Pool,
        namespace: Namespace,
        own_key: int,
        boot: Callable[[], int],
        client: ControlClient,
        members: Callable[[], Mapping[int, Member]],
        departures: Departures,
        followers: Followers,
        taking_back: TakingBack,
        directory: DirectoryClient,
        retire: Callable[[float], None],
        fall_silent: Callable[[float], None],
        metrics: Metrics,
    ) -> None:
        """``retire`` ends publishing here for a drain of so many seconds, and tells peers that this node is draining.

        ``fall_silent`` ends all telling of where this node's pages are; it blocks until its argument at most.
        """
        self._pool = pool
        self._namespace = namespace
        self._own_key = own_key
        self._boot = boot
        self._client = client
        self._members = members
        self._departures = departures
        self._followers = followers
        self._taking_back = taking_back
        self._directory = directory
        self._retire = retire
        self._fall_silent = fall_silent
        self._metrics = metrics
        self._draining = threading.Lock()  # held by who drains
        self._starting = threading.Lock()  # guards `_thread`
        self._has_begun = threading.Event()
        self.seconds: float | None = None
        """Within how many seconds this node was told to drain; None while nobody has told it to."""
        self._drained: Drained | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether this node is about to leave."""
        return self._has_begun.is_set()

    @property
    def drained(self) -> Drained | None:
        """What has become of the pages, once that is known."""
        return self._drained

    def drain(self, seconds: float) -> Drained:
        """Hand over what can be within ``seconds``; blocks until then at most. Raises ClosedError.

        Who asks while somebody else's drain is under way waits for that as long, and is told that it is not done yet.
        """
        self._has_begun.set()
        if not self._draining.acquire(timeout=seconds):
            return Drained(0, 0, 0, {}, "a drain that was begun before is not done yet", seconds)
        try:
            if self._drained is None:
                self.seconds = seconds
                self._retire(seconds)
                self._drained = self._drain(seconds)
                _log.info("%s", sentence(self._drained))
            return self._drained
        finally:
            self._draining.release()

    def begin(self, seconds: float) -> None:
        """Drain in the background, if that has not begun: :attr:`drained` says when it is done.

        When this returns nothing is stored any more.
        """
        with self._starting:
            if self._thread is None and not self.has_begun:
                has_retired = threading.Event()
                thread = threading.Thread(
                    target=self._run, args=(seconds, has_retired), name="p2pkv-drain", daemon=True
                )
                thread.start()  # first, since it may fail
                self._thread = thread
                try:
                    self._has_begun.set()
                    self.seconds = seconds
                    self._retire(seconds)
                finally:
                    has_retired.set()

    def _run(self, seconds: float, may_drain: threading.Event) -> None:
        may_drain.wait()
        try:
            self.drain(seconds)
        except ClosedError:
            _log.info("the node is closed before its pages were handed over")
        except Exception as error:  # noqa: BLE001  # the top of a thread
            _log.exception("pages were not handed over")
            # who waits for the end of it must not wait for ever
            self._drained = Drained(0, 0, 0, {}, f"it failed: {type(error).__name__}: {error}", 0.0)

    def close(self) -> None:
        """Wait for what runs in the background, which ends when the control client is closed. Idempotent."""
        with self._starting:
            if self._thread is not None:
                self._thread.join()

    def _drain(self, seconds: float) -> Drained:
        began = time.monotonic()
        until = began + seconds
        uses = self._hottest()
        work = Work(uses)
        asked: set[tuple[int, int]] = set()
        pages_until = until - min(_LET_GO_S, _LET_GO_SHARE * seconds)
        receivers = self._receivers(asked, pages_until) if len(uses) and seconds > 0 else []
        # Into free room first, wherever that is: it costs nobody a page.
        self._hand_out(work, receivers, pages_until, may_replace=False)
        if seconds > 0 and work.has_some:
            # Who was restarted just before this node leaves has most room, and may not be known here yet.
            waits = min(_RETURN_S, _RETURN_SHARE * seconds)
            self._departures.wait(min(pages_until, time.monotonic() + waits))
            receivers += self._receivers(asked, pages_until)
            self._hand_out(work, receivers, pages_until, may_replace=False)
        self._hand_out(work, receivers, pages_until, may_replace=True)
        if seconds > 0:
            receivers += self._hand_out_to_late(work, asked, pages_until)
        if self._doubt_the_silent(work, receivers):
            self._hand_out(work, receivers, pages_until, may_replace=True)
        self._hand_out_unread(receivers, pages_until)
        n_handed_over = sum(receiver.n_taken for receiver in receivers)
        n_adopted = self._let_go(until) if seconds > 0 else 0
        self._lead_elsewhere(receivers, until)
        n_gone = sum(receiver.n_gone for receiver in receivers)
        n_left = len(uses) - n_handed_over - n_gone
        for outcome, n in (("handed_over", n_handed_over), ("left", n_left), ("gone", n_gone)):
            self._metrics.count(self._metrics.drained_pages, outcome, n)
        return Drained(
            n_pages=len(uses),
            n_handed_over=n_handed_over,
            n_adopted=n_adopted,
            receivers={one.member.node_id: one.n_taken for one in receivers if one.n_taken},
            reason=why_left(receivers, is_over=time.monotonic() >= pages_until) if n_left else "",
            seconds=time.monotonic() - began,
        )

    def _hand_out_to_late(self, work: Work, asked: set[tuple[int, int]], until: float) -> list[Receiver]:
        """Have those take what is left who had not answered, since their interpreter was held, say; return them."""
        receivers: list[Receiver] = []
        for _ in range(_MOST_ASKED):
            if not (work.has_some and self._unasked(asked)) or time.monotonic() >= until:
                break
            late = self._receivers(asked, until)
            for may_replace in (False, True):
                self._hand_out(work, late, until, may_replace=may_replace)
            receivers += late
        return receivers

    def _hand_out_unread(self, receivers: Sequence[Receiver], until: float) -> None:
        """Have others take what one of them could not read."""
        unable: list[Receiver] = []
        for receiver in receivers:
            if not receiver.unread:
                continue  # now: at another one's turn it may have given its own back, or have got some
            unable.append(receiver)
            others = [one for one in receivers if one is not receiver]
            work = Work(np.concatenate(receiver.unread))
            for may_replace in (False, True):
                self._hand_out(work, others, until, may_replace=may_replace)
        for receiver in unable:
            receiver.refusal = receiver.refusal or CANT_READ

    def _doubt_the_silent(self, work: Work, receivers: Sequence[Receiver]) -> bool:
        """Let others have what was taken by those who are gone, or did not answer; whether there is any."""
        members = self._members().values()
        present = {(member.node_id, member.boot_epoch) for member in members}
        doubted: list[NDArray[np.void]] = []
        for receiver in receivers:
            if receiver.is_silent or (receiver.member.node_id, receiver.member.boot_epoch) not in present:
                doubted += receiver.taken
                receiver.taken = []
        if doubted:
            work.add(np.concatenate(doubted))
        return bool(doubted)

    def _hottest(self) -> NDArray[np.void]:
        """Return this node's own pages, those used last first."""
        cursor, parts = 0, []
        while True:
            raw, cursor = self._pool.native.list_uses(cursor, LISTED)
            parts.append(raw.reshape(-1).view(USE))
            if cursor == 0:
                break
        uses = np.concatenate(parts)
        uses["nbytes"] = self._pool.block_nbytes(uses["nbytes"])  # what a page takes wherever it comes
        return uses[np.argsort(uses["stamp"], kind="stable")[::-1]]

    def _unasked(self, asked: set[tuple[int, int]]) -> list[Member]:
        """Return who may have room and has not answered yet."""
        return [
            m
            for m in self._members().values()
            if m.weight > 0 and not m.is_draining and (m.key, m.boot_epoch) not in asked
        ]

    def _receivers(self, asked: set[tuple[int, int]], until: float) -> list[Receiver]:
        """Return who of those that have not been ``asked`` would take pages over, those with most room first.

        Who does not answer within a second counts as not asked.
        """
        those = self._unasked(asked)
        deadline = min(until, time.monotonic() + _ASK_S)
        receivers = []
        with self._client.send([self._request(m, b"", 0.0, may_replace=False) for m in those]) as calls:
            for index, reply in calls.replies(deadline - time.monotonic()):
                receiver = Receiver(those[index])
                receivers.append(receiver)
                asked.add((those[index].key, those[index].boot_epoch))
                if not reply.ok:
                    receiver.refusal = refusal_of(reply.status, reply.body)
                elif len(reply.body) == 2 * U64.size:
                    receiver.take_room(reply.body)
        return sorted(receivers, key=lambda one: (one.free, one.replaceable), reverse=True)

    def _hand_out(
        self, work: Work, receivers: Sequence[Receiver], until: float, *, may_replace: bool
    ) -> None:
        willing = [one for one in receivers if not one.refusal and one.room(may_replace=may_replace)]
        if not willing:
            return
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(_AT_ONCE, "p2pkv-drain") as threads, suppress(RuntimeError):
            # Where no more threads are to be had those that are there do what was submitted.
            for receiver in willing:
                futures.append(threads.submit(self._fill, work, receiver, until, may_replace=may_replace))
        for future in futures:
            future.result()
        if not futures:
            for receiver in willing:
                self._fill(work, receiver, until, may_replace=may_replace)

    def _fill(self, work: Work, receiver: Receiver, until: float, *, may_replace: bool) -> None:
        """Hand pages to one node until it has no more room, or the time is over."""
        longest = self._pool.nbytes
        while not receiver.refusal and (left := until - time.monotonic()) > 0:
            uses = work.take(receiver.room(may_replace=may_replace), longest, until)
            if not len(uses):
                return
            given_back = uses
            try:
                outcomes = self._offer(receiver, uses, min(left, _ANSWER_S), may_replace=may_replace)
                given_back = np.concatenate(
                    [receiver.note_unread(uses, outcomes), uses[np.isin(outcomes, OPEN)]]
                )
            finally:
                work.settle(given_back)
            receiver.taken.append(uses[np.isin(outcomes, TAKEN)])
            receiver.n_gone += int((~np.isin(outcomes, (*TAKEN, *OPEN, PrefetchOutcome.NOT_READ))).sum())
            if np.isin(outcomes, LATE).any():
                receiver.refusal = receiver.refusal or "it did not bring them in time"
            if len(refused := uses["nbytes"][outcomes == PrefetchOutcome.NO_ROOM]):
                longest = int(refused.max()) - 1  # shorter ones may have a place

    def _offer(
        self, receiver: Receiver, uses: NDArray[np.void], seconds: float, *, may_replace: bool
    ) -> NDArray[np.uint8]:
        """Ask a node to take these over; return what became of each, as a prefetch says it."""
        ids: Keys = np.ascontiguousarray(uses["key"])
        found, locations = self._pool.lookup(ids)
        there = found.astype(bool)
        outcomes = np.full(len(uses), PrefetchOutcome.NOT_FOUND, np.uint8)
        entries = np.zeros(int(there.sum()), TAKE_OVER_ENTRY)
        entries["key"], entries["location"] = ids[there], locations[there]
        its_own = seconds * _ITS_SHARE
        request = self._request(receiver.member, entries.tobytes(), its_own, may_replace=may_replace)
        reply = self._client.ask(request, seconds)
        if reply is not None and reply.ok and len(reply.body) == 2 * U64.size + len(entries):
            receiver.take_room(reply.body)
            outcomes[there] = np.frombuffer(reply.body, np.uint8, offset=2 * U64.size)
            unread = np.flatnonzero(outcomes == PrefetchOutcome.NOT_READ)
            if len(unread):
                found, _ = self._pool.lookup(np.ascontiguousarray(ids[unread]))
                outcomes[unread[found == 0]] = PrefetchOutcome.NOT_FOUND
        else:
            outcomes[there] = PrefetchOutcome.CANCELED  # others may have them
            receiver.is_silent = reply is None
            receiver.refusal = "it did not answer" if reply is None else refusal_of(reply.status, reply.body)
        return outcomes

    def _request(self, member: Member, entries: bytes, seconds: float, *, may_replace: bool) -> Request:
        header = TAKE_OVER.pack(
            self._namespace.prefix, self._own_key, self._boot(), int(seconds * 1000), may_replace
        )
        n_entries = len(entries) // TAKE_OVER_ENTRY.itemsize
        return Request(
            member.address, Kind.TAKE_OVER, header + entries, count=n_entries, boot=member.boot_epoch
        )

    def _let_go(self, until: float) -> int:
        """Leave the pages to those who have them, unless one is being taken back at this moment."""
        if not self._taking_back.end(until):
            _log.warning("pages are being taken back still: what others have of this node's stays its guests")
            return 0
        return self._followers.let_go(until)

    def _lead_elsewhere(self, receivers: Sequence[Receiver], until: float) -> None:
        """Take this node's entries of pages that others have out of the directory.

        Nodes hear at different moments that another one has left. One that knows must not be told by one that does not
        that a page lies there. Nor is it put there again, because the ring has moved or an owner has missed it.
        """
        if any(receiver.n_taken for receiver in receivers):
            self._fall_silent(until)
        for uses in (uses for receiver in receivers for uses in receiver.taken):
            keys: Keys = np.ascontiguousarray(uses["key"])
            found, locations = self._pool.lookup(keys)
            there = found.astype(bool)
            if time.monotonic() >= until:
                return
            if there.any():
                self._directory.drop(keys[there], locations[there], until, by_owner=True)
