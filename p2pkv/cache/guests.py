"""What nodes tell each other about guests: pages of one that lie in another's pool as well.

Who reads pages to keep them *follows* their owner, and is told by it what it takes back. Both are answered by native
threads (``native/src/pool/guests.h``, which has the rules); this is the side that asks and tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import (
    FOLLOWED_PAGE,
    LET_GO,
    MAX_ENTRIES,
    TAKE_BACK,
    TAKEN_BACK,
    U32,
    U64,
    Kind,
    Reply,
)
from p2pkv.directory.given_up import MOMENT_S
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Locations

Members = Callable[[], Mapping[int, Member]]
"""Returns those in the view, but for this node, by their keys."""

_LOOK_S = 0.05
"""How often who waits for answers looks whether he waits for somebody who is a member no more."""
_POLLS = 2
"""What was taken back unheard costs the guests at the second answer that says so, and not before."""
_YOUNG_S = 5.0
"""For so long after it has met a member a node tells it what it takes back: one that holds pages of this node's earlier
run, or was forgotten while it was away, follows it only when it has met it as well."""
_LET_BE_S = 1.0
"""For so long nothing is told to one that was given up and has let a moment pass. It has died, and would hold up all
that is taken back for a minute, or it hears within that time that it was given up."""


class StoreStatus(IntEnum):
    """What became of a page that was to be stored as a guest. Mirrors ``StoreStatus`` of the core."""

    STORED = 0
    EXISTS = 1
    NO_ROOM = 2
    TAKEN_BACK = 3
    CHANGED = 4


@dataclass(frozen=True, slots=True)
class Word:
    """What an owner has answered to a follow."""

    log: int
    number: int
    is_own: NDArray[np.bool_]
    """``(n,)``: which of the pages it was asked for are its own, where they were said to be."""


class _Contact(NamedTuple):
    """What is another one after a time in which a source may have told this node nothing of what it took back."""

    n_sleeps: int
    """How often this process had slept."""
    met_since: float | None
    """Since when the source had been a member: while it is none to this node, this node may be none to it."""


class Sources:
    """The nodes whose pages this one holds. Used by one thread, as the native side asks for."""

    def __init__(
        self,
        own_key: int,
        native: _native.Guests,
        client: ControlClient,
        members: Members,
        *,
        met_since: Callable[[int], float | None],
        epochs: _native.NamespaceEpochs,
    ) -> None:
        """``epochs`` knows how often this process has slept, and hears when what it has missed so is known again.

        ``met_since``: since when a node has been a member without a break, None if it is none.
        """
        self._own_key = own_key
        self._native = native
        self._client = client
        self._members = members
        self._met_since = met_since
        self._epochs = epochs
        self._n_sleeps = 0
        self._n_answered = 0
        """How often in a row all sources have answered since this process slept last."""
        self._n_caught_up = 0
        """After how many sleeps what it had missed so was known again last."""
        self.n_silent = 0
        """How many sources did not answer last, while no guest is found by engines before all have."""
        self._when_heard: dict[int, _Contact] = {}
        """The contact in which each source was asked what it has answered last."""

    def follow(self, ids: Keys, locations: Locations, deadline: float) -> dict[int, Word]:
        """Have the owners of these pages tell this node what they take back; return their answers by node key.

        From an answer on, whatever is read and stored under it goes when its owner takes it back. Who does not answer
        by the deadline, or knows nothing of guests, is left out.
        """
        members = self._members()
        owners: list[int] = []
        requests: list[Request] = []
        for owner in np.unique(locations["owner"]).tolist():
            if (member := members.get(owner)) is None:
                continue
            mine = locations["owner"] == owner
            pages = np.zeros(int(mine.sum()), FOLLOWED_PAGE)
            pages["key"], pages["generation"] = ids[mine], locations["generation"][mine]
            owners.append(owner)
            requests.append(self._request(member, pages.tobytes(), len(pages)))
        words = {}
        contacts = [self._contact(owner) for owner in owners]  # after it is known which run is asked
        with self._client.send(requests) as calls:
            for index, reply in calls.replies(deadline - time.monotonic()):
                word = self._take(owners[index], reply, requests[index].count, contacts[index])
                if word is not None:
                    words[owners[index]] = word
        return words

    def poll(self, deadline: float) -> int:
        """Ask all whose guests are here what they have taken back; return how many there are.

        What one of them has said meanwhile and was not heard here costs all its guests.
        """
        n_sleeps = self._epochs.n_sleeps
        sources, members = self._native.sources(), self._members()
        # one that is gone can take nothing back; it is asked when it is here again
        present = [source for source in sources if source in members]
        contacts = [self._contact(source) for source in present]  # after it is known which run is asked
        n_answered = 0
        with self._client.send([self._request(members[source], b"", 0) for source in present]) as calls:
            for index, reply in calls.replies(deadline - time.monotonic()):
                n_answered += self._take(present[index], reply, 0, contacts[index]) is not None
        # what goes is no source's any more, and is there until it has gone
        is_going = self._native.is_going()
        n_silent = len(sources) - n_answered
        is_whole = n_silent == 0 and not is_going
        self._note_polled(n_sleeps, is_whole=is_whole, has_guests=bool(sources) or is_going)
        self.n_silent = 0 if self._n_caught_up == n_sleeps else n_silent
        self._when_heard = {key: contact for key, contact in self._when_heard.items() if key in sources}
        return len(sources)

    def _note_polled(self, n_sleeps: int, *, is_whole: bool, has_guests: bool) -> None:
        if n_sleeps != self._n_sleeps:
            self._n_sleeps, self._n_answered = n_sleeps, 0
        self._n_answered = self._n_answered + 1 if is_whole else 0
        if self._n_answered >= _POLLS or not has_guests:
            self._epochs.guests_caught_up(n_sleeps)
            self._n_caught_up = n_sleeps

    def _request(self, member: Member, pages: bytes, n_pages: int) -> Request:
        body = U64.pack(self._own_key) + pages
        return Request(member.address, Kind.FOLLOW, body, count=n_pages, boot=member.boot_epoch)

    def _contact(self, source: int) -> _Contact:
        return _Contact(self._epochs.n_sleeps, self._met_since(source))

    def _take(self, source: int, reply: Reply, n_pages: int, contact: _Contact) -> Word | None:
        """Take an answer that was asked for in this contact."""
        if not reply.ok or len(reply.body) != TAKEN_BACK.size + n_pages:
            return None
        log, number = TAKEN_BACK.unpack_from(reply.body)
        was_out_of_touch = self._when_heard.get(source, contact) != contact
        self._native.followed(source, log, number, was_out_of_touch)
        self._when_heard[source] = contact
        return Word(log, number, np.frombuffer(reply.body, np.uint8, offset=TAKEN_BACK.size).astype(bool))


class TakingBack:
    """Whether this node may take pages back, which it may not once it has let go of them. Thread-safe.

    Used in ``with`` statements around all that takes back.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._changed = threading.Condition()  # its lock guards what follows
        self._n_under_way = 0
        self._is_over = False

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over:
                raise ClosedError(
                    f"node {self._node_id} has handed its pages over to others, whose own they are now, and takes back "
                    "no more; bump the namespace if they must go"
                )
            self._n_under_way += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._n_under_way -= 1
            self._changed.notify_all()

    def end(self, deadline: float) -> bool:
        """Begin no more; wait for those under way. False if some still are at the deadline."""
        with self._changed:
            self._is_over = True
            left = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._n_under_way == 0, left)


class Followers:
    """Those who hold pages of this node. Thread-safe."""

    def __init__(
        self,
        own_key: int,
        native: _native.Guests,
        client: ControlClient,
        members: Members,
        metrics: Metrics,
        given_up: Callable[[], Iterable[Member]] = tuple,
    ) -> None:
        """``given_up`` returns those that were members a short time ago, and may be again."""
        self._own_key = own_key
        self._native = native
        self._client = client
        self._members = members
        self._metrics = metrics
        self._given_up = given_up
        self._meeting = threading.Lock()  # guards what follows
        self._met: dict[int, float] = {}  # since when each member has been one, as this node was told
        self._let_be: dict[tuple[str, int], float] = {}  # until when each of those given up is told nothing
        # Held while followers are told, so that they hear in the order of the numbers. One that hears of a later one
        # first takes a word for lost, and loses more than it need.
        self._telling = threading.Lock()

    def view_changed(self) -> None:
        """Take note of who has come; forget those who have been away for a minute."""
        members, now = self._members(), time.monotonic()
        with self._meeting:
            self._met = {key: self._met.get(key, now) for key in members}
        self._native.forget_absent(list(members), time.monotonic_ns())

    def met_since(self, key: int) -> float | None:
        """Return since when a node has been a member without a break, as this node was told; None if it is none."""
        with self._meeting:
            return self._met.get(key)

    def let_go(self, deadline: float) -> int:
        """Have who follows this node take its guests for own pages; return how many pages that were, in all.

        This node takes nothing back any more. Blocks until all have answered, or for as long as the deadline allows;
        what others have stays a guest where one did not answer.
        """
        members = self._members()
        those = [members[key] for key in self._native.followers() if key in members]
        body = LET_GO.pack(self._own_key, *self._native.taken_back())
        requests = [Request(m.address, Kind.LET_GO, body, boot=m.boot_epoch) for m in those]
        n_pages = 0
        with self._client.send(requests) as calls:
            for _, reply in calls.replies(deadline - time.monotonic()):
                n_pages += U32.unpack(reply.body)[0] if reply.ok and len(reply.body) == U32.size else 0
        return n_pages

    def tell(self, ids: Keys | None, deadline: float) -> None:
        """Tell who follows this node that it has taken these pages back, or all of them; they are gone here already.

        Blocks until every member among them has taken out what it had, or for as long as the deadline allows. Those who
        have not answered by then are told when they answer again, and may find the pages until then. Who was given up
        of late is told as well, and waited for for a moment, once a second.
        """
        n_unheard = 0
        with self._in_turn(deadline):
            for batch in _batches(ids):
                n_unheard += self._tell(batch, deadline)
        if n_unheard:
            self._metrics.unheard_take_backs.inc(n_unheard)

    def _tell(self, ids: Keys | None, deadline: float) -> int:
        # Counted first: who follows from now on reads nothing of what is gone.
        log, number = self._native.count_taken_back()
        # Members first: who is given up before the next line is in that, and who comes back by then still is.
        members = self._members()
        given_up = {member.key: member for member in self._given_up() if not self._is_let_be(member)}
        reachable = {**given_up, **members}
        keys = {*self._native.followers(), *self._young(members)} & reachable.keys()
        waiting = {index: reachable[key] for index, key in enumerate(keys)}
        moment_ends = time.monotonic() + MOMENT_S
        body, count = TAKE_BACK.pack(self._own_key, log, number - 1, number, ids is None), 0
        if ids is not None:
            body, count = body + ids.tobytes(), len(ids)
        requests = [
            Request(m.address, Kind.TAKE_BACK, body, count=count, boot=m.boot_epoch) for m in waiting.values()
        ]
        with self._client.send(requests) as calls:
            while calls.are_pending() and (left := deadline - time.monotonic()) > 0:
                answer = calls.next(min(_LOOK_S, left))
                if answer is not None:
                    del waiting[answer[0]]
                elif self._n_present(waiting) == 0 and time.monotonic() >= moment_ends:
                    self._let_them_be(waiting.values())
                    break
        return self._n_present(waiting)

    def _is_let_be(self, member: Member) -> bool:
        with self._meeting:
            return self._let_be.get((member.node_id, member.boot_epoch), 0.0) > time.monotonic()

    def _let_them_be(self, those: Iterable[Member]) -> None:
        now = time.monotonic()
        with self._meeting:
            self._let_be = {boot: until for boot, until in self._let_be.items() if until > now}
            self._let_be.update(((member.node_id, member.boot_epoch), now + _LET_BE_S) for member in those)

    def _young(self, members: Mapping[int, Member]) -> list[int]:
        since = time.monotonic() - _YOUNG_S
        with self._meeting:
            return [key for key in members if self._met.get(key, since) >= since]

    def _n_present(self, waiting: Mapping[int, Member]) -> int:
        """Return how many of them are members still, as they were."""
        present = {(member.node_id, member.boot_epoch) for member in self._members().values()}
        return sum((member.node_id, member.boot_epoch) in present for member in waiting.values())

    @contextmanager
    def _in_turn(self, deadline: float) -> Iterator[None]:
        """Wait for those who tell at this moment, but not beyond the deadline: late is better than never."""
        is_mine = self._telling.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            yield
        finally:
            if is_mine:
                self._telling.release()


def _batches(ids: Keys | None) -> Iterator[Keys | None]:
    if ids is None:
        yield None
        return
    for first in range(0, len(ids), MAX_ENTRIES):
        yield ids[first : first + MAX_ENTRIES]
