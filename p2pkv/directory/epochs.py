"""Epochs of namespaces over the cluster: a bump, and how those hear of one who were away.

A bump raises the epoch of a namespace on every member, and from then on nothing that was published before it is
found: keys are hashed with the epoch (:class:`~p2pkv.page.Namespace`), and a node that hears of a new one takes back
what it had published itself, in memory and on disk, before it answers. Native threads answer, so that an interpreter
that is held holds up no bump.

An epoch is the time of day in nanoseconds, or one more than any that a member knows. So epochs grow over restarts of a
whole cluster, and no clock has to be right.

Who could not be reached keeps what it knows until somebody tells it: it is told as soon as it is in the view again,
asks before it begins to publish when it starts, and every second one member is asked, at random. Members that were
given up of late are told as well, since some of them may live (:mod:`.given_up`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from p2pkv import _native
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind, Reply, pack_epochs, unpack_epochs
from p2pkv.directory.given_up import MOMENT_S
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError, ControlError, UsageError
from p2pkv.limited_log import LimitedLog
from p2pkv.page import name_digest
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

Told = tuple[bytes, int]
"""The digest of a namespace's name and its epoch."""
_LOOK_S = 0.05
"""How often a bump that waits for answers looks who is still a member, and who has become one."""
_SPREAD_S = 1.0
_ANSWER_S = 0.5
_ASKED_FIRST = 3
"""So many members are asked by one that starts. All that are reached have heard of each bump that has returned."""


@dataclass(frozen=True, slots=True)
class Bump:
    """Says who has heard of a bump."""

    epoch: int
    """The namespace's pages are hashed with it from now on."""
    heard: tuple[str, ...]
    """The ids of the nodes that know of it: they find nothing of before, and have taken back what they had."""
    unreached: tuple[str, ...]
    """Those that were members during the call and did not answer: until they are reached, they find what was published
    before, with each other."""


class EpochKeeper(Resource):
    """Keeps what a node knows of epochs that of its cluster, in a thread from :meth:`start` to :meth:`close`.

    :meth:`bump` and :meth:`learn` need no thread.
    """

    def __init__(
        self,
        known: _native.NamespaceEpochs,
        client: ControlClient,
        members: Callable[[], Iterable[Member]],
        *,
        given_up: Callable[[], Iterable[Member]] = tuple,
        remember: Callable[[Callable[[], list[Told]]], object] | None = None,
        look: Callable[[float], None] | None = None,
        settle: Sequence[Callable[[float], bool]] = (),
        random: Random | None = None,
    ) -> None:
        """``members`` returns those in the view but for this node; ``remember`` is told to write what is known.

        ``given_up`` returns those that were members a short time ago, and may be again.
        ``look`` is for who does not hear at once who is a member: it has ``members`` return them, by a deadline.
        ``settle`` is what has to be done for a bump to hold in the next life of this node as well: each waits so many
        seconds at most for its part, and returns whether nothing is to be waited for any more.
        """
        self._known = known
        self._client = client
        self._members = members
        self._given_up = given_up
        self._random = random or Random()  # noqa: S311 - whom to ask, nothing secret
        self._log = LimitedLog(_log)
        # Guards what follows; reentrant, since a signal's handler may close the node wherever a thread is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._met: dict[_Boot, Member] = {}
        self._closed = False
        self._deaf: set[_Boot] = set()  # of a p2pkv that has no epochs
        # Used by the thread only.
        self._look = look
        self._settle = settle
        self._remember = remember
        self._remembered = known.version
        self._epoch = known.own
        self._thread: threading.Thread | None = None

    def bump(self, namespace: str, deadline: float) -> Bump:
        """Raise the epoch of ``namespace`` here and at all members, also those to come meanwhile.

        Returns when they know, or at the deadline. Two bumps at once both hold: after either, nothing of before it is
        found. Raises :class:`~p2pkv.errors.ClosedError`.
        """
        name = name_digest(namespace)
        if self._look is not None:
            self._look(deadline)
        epoch, heard, missing = self._raise(name, deadline)
        if self._greatest() > epoch:
            # Somebody knew of a higher one, under which pages may have been published before this call. Whatever is
            # higher than the next one came after that.
            epoch, heard, missing = self._raise(name, deadline)
        for settle in self._settle:
            self._wait_for(settle, deadline)
        return Bump(epoch, tuple(sorted(heard)), tuple(sorted(missing)))

    def _raise(self, name: bytes, deadline: float) -> tuple[int, set[str], set[str]]:
        """Raise an epoch above all that are known here; return it, who has heard of it, and who has not."""
        epoch = max(time.time_ns(), self._greatest() + 1)
        if epoch >= self._known.END:
            raise UsageError(
                f"a node has told of epoch {epoch - 1}, which is beyond every clock, and there is none above it; "
                "restart all nodes of this cluster with empty disks, and find out which one said so"
            )
        self._known.raise_to([(name, epoch)])
        heard: set[str] = set()
        asked: set[_Boot] = set()
        maybe_asked: set[_Boot] = set()
        while True:
            # Members first: who is given up before the next line is in that, and who comes back by then still is.
            lacking = {_boot(m): m for m in self._members() if _boot(m) not in asked}
            maybe = {_boot(m): m for m in self._given_up() if _boot(m) not in asked | maybe_asked}
            if not (lacking or maybe):
                break
            asked |= lacking.keys()
            maybe_asked |= maybe.keys()
            those = list((maybe | lacking).values())
            heard.update(member.node_id for member in self._tell(those, [(name, epoch)], deadline))
        # an id that was restarted meanwhile has been told as what it is now
        return epoch, heard, {node_id for node_id, _ in asked} - heard

    def _wait_for(self, settle: Callable[[float], bool], deadline: float) -> None:
        while not settle(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            if self._closed:
                raise ClosedError("the node is closed")
            if time.monotonic() >= deadline:
                return

    def _greatest(self) -> int:
        return max((epoch for _, epoch in self._known.all()), default=0)

    def _tell(self, those: Sequence[Member], told: Sequence[Told], deadline: float) -> list[Member]:
        """Tell these; return who has answered by the deadline, or when the others are members no more.

        Also those who are none from the beginning are waited for for a moment.
        """
        heard = []
        moment_ends = time.monotonic() + MOMENT_S
        waited_for = set(map(_boot, those))
        with self._client.send([_request(member, told) for member in those]) as calls:
            while calls.are_pending() and (left := deadline - time.monotonic()) > 0:
                answer = calls.next(min(_LOOK_S, left))
                if self._closed:
                    raise ClosedError("the node is closed")
                if answer is None:
                    are_members = not waited_for.isdisjoint(map(_boot, self._members()))
                    if not are_members and time.monotonic() >= moment_ends:
                        break
                    continue
                member, reply = those[answer[0]], answer[1]
                waited_for.discard(_boot(member))
                if self._take(member, reply):
                    heard.append(member)
        return heard

    def _take(self, member: Member, reply: Reply) -> bool:
        """Raise what a member has answered; False if it did not take what it was told."""
        if not reply.ok:
            if reply.boot == member.boot_epoch:
                with self._lock:
                    self._deaf.add(_boot(member))
            return False
        try:
            self._known.raise_to(unpack_epochs(reply.body, reply.count))
        except (ControlError, ValueError) as error:
            message = "node %s gave an answer that can't be used: %s"
            self._log.warning(member.node_id, message, member.node_id, error)
            return False
        return True

    def learn(self, deadline: float) -> None:
        """Ask some members what they know; for one that starts. Blocks until they answer, or the deadline."""
        members = list(self._members())
        self._tell(self._random.sample(members, min(_ASKED_FIRST, len(members))), self._known.all(), deadline)

    def learn_from_one(self, members: Sequence[Member], deadline: float) -> bool:
        """Ask some of these members what they know; True as soon as one has said it, False at the deadline.

        A member that answers knows every bump that has returned, unless the bump named it as one that was not reached.
        """
        asked = self._random.sample(members, min(_ASKED_FIRST, len(members)))
        told = self._known.all()
        with self._client.send([_request(member, told) for member in asked]) as calls:
            while calls.are_pending() and (left := deadline - time.monotonic()) > 0:
                answer = calls.next(left)
                if answer is not None and self._take(asked[answer[0]], answer[1]):
                    return True
        return False

    def start(self) -> None:
        """Go on asking and telling."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-epochs", daemon=True)
        self._thread.start()

    def met(self, members: Iterable[Member]) -> None:
        """Tell these soon, who were not in the view before. Never blocks."""
        with self._lock:
            self._met.update((_boot(member), member) for member in members)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._met, _SPREAD_S)
                if self._closed:
                    return
                met, self._met = self._met, {}
            try:
                self._turn(met)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(
                    type(error).__name__, "peers were not told of epochs; trying again", exc_info=error
                )

    def _turn(self, chosen: dict[_Boot, Member]) -> None:
        """Tell those who are new, and somebody at random."""
        n_sleeps = self._known.n_sleeps
        members = {_boot(member): member for member in self._members()}
        if members:
            boot = self._random.choice(list(members))
            chosen[boot] = members[boot]
        with self._lock:
            self._deaf &= members.keys()
            asked = [member for boot, member in chosen.items() if boot not in self._deaf]
        heard = self._tell(asked, self._known.all(), time.monotonic() + _ANSWER_S)
        if heard or not asked:
            self._known.caught_up(n_sleeps)
        self._note()

    def _note(self) -> None:
        """Say and remember what is new here, whoever told it."""
        version, epoch = self._known.version, self._known.own
        if epoch != self._epoch:
            _log.info(
                "this node's namespace is in epoch %d: what was published before is found no more", epoch
            )
            self._epoch = epoch
        if self._remember is not None and version != self._remembered:
            self._remember(self._known.all)
            self._remembered = version

    def interrupt(self) -> None:
        """Let a bump that is under way end at once, with ClosedError."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stop. Idempotent."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
            self._note()


_Boot = tuple[str, int]


def _boot(member: Member) -> _Boot:
    return member.node_id, member.boot_epoch


def _request(member: Member, told: Sequence[Told]) -> Request:
    return Request(member.address, Kind.EPOCHS, pack_epochs(told), count=len(told), boot=member.boot_epoch)
