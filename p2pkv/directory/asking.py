"""One question to the shards of several nodes, over channels where they lead and over the control socket elsewhere.

Both paths are taken at the same time and within one call, so that an owner without a channel slows nobody else down.
What comes too late is not lost: a channel's next call skips it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, Reply, ReplyStatus
from p2pkv.directory.membership.timing import Clock
from p2pkv.directory.paths import ChannelPath, ControlPath
from p2pkv.directory.routes import Route
from p2pkv.directory.view import Member
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics

SILENT_OWNER_S = 0.020
"""Twenty round trips on a busy machine, and no more than a fetch may lose to a peer that has stopped."""
MOST_HOLDERS = 4
"""A look-up asks for so many holders of a page, and no owner names more; ``kMostHolders`` of the native core."""
_TURN_S = 0.002
"""How long a call that takes both paths waits for one of them before it looks at the other."""


def do_nothing() -> None:
    """Stand in for something to do meanwhile."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a call asks the owners: ``kind``, and for each key a record.

    Answers to GET, HELD and PROMOTE fill the last two, answers to CHECK the first of them.
    """

    kind: Kind
    ask: _native.AskBatch
    records: NDArray[np.uint8]
    found: NDArray[np.uint8] | None = None
    locations: NDArray[np.uint8] | None = None
    others: _native.OtherHolders | None = None
    """Where a GET puts the holders of a page that are named beside the first; None: one is asked for."""

    def send(self, lines: Lines) -> _native.AskedOwners:
        """Ask over channels, and wait for nothing; who has none is left to ask."""
        return self.ask.send(
            self.kind, self.records, lines.owners, lines.channels, self.found, self.locations, self.others
        )

    def put_to(self, lines: Lines, timeout: float) -> list[bool]:
        """Ask over channels and take the answers, in one call of native code; return which can be used again."""
        return self.ask.ask(
            self.kind,
            self.records,
            lines.owners,
            lines.channels,
            self.found,
            self.locations,
            timeout,
            lines.patience,
            self.others,
        )

    def take(self, index: int, asked: Kind, reply: Reply) -> None:
        """Take an owner's good reply to a request of this kind."""
        if self.found is None:
            self.ask.acknowledge(index)
        elif self.locations is None:
            self.ask.take_flags(index, reply.body, self.found)
        elif asked in (Kind.LOCATE, Kind.HELD):
            self.ask.take_located(index, reply.body, self.records, self.found, self.locations, self.others)
        else:
            self.ask.take_found(index, reply.body, self.found, self.locations)


@dataclass(frozen=True, slots=True)
class Lines:
    """The owners that a call asks: those that a lent channel leads to, and the others."""

    owners: list[int]
    members: list[Member]
    channels: list[_native.DirectoryChannel]
    others: list[int]
    patience: float
    """How many seconds an owner that stays silent is waited for."""


class Asked(Protocol):
    """What was asked over channels."""

    def wait(self, timeout: float, patience: float) -> None:
        """Take answers; return when there is no use in waiting any longer."""

    def is_waiting(self) -> bool:
        """Whether somebody who was asked has not answered."""

    def end(self, patience: float) -> list[bool]:
        """Return which channels can be used again."""


class Owners:
    """Asks them. Thread-safe; blocks at most until a call's deadline."""

    def __init__(self, control: ControlPath, channels: ChannelPath, metrics: Metrics, clock: Clock) -> None:
        self._control = control
        self._channels = channels
        self._metrics = metrics
        self._clock = clock

    def borrow(self, route: Route, owners: list[int]) -> Lines:
        """Take a channel to each that one leads to; for :meth:`take_answers` to give back."""
        members = [route.ring.members[owner] for owner in owners]
        channels = self._channels.borrow(members)
        lines = [line for line in zip(owners, members, channels, strict=True) if line[2] is not None]
        return Lines(
            [owner for owner, _, _ in lines],
            [member for _, member, _ in lines],
            [channel for channel in channels if channel is not None],
            [owner for owner, channel in zip(owners, channels, strict=True) if channel is None],
            SILENT_OWNER_S,
        )

    def give_back(self, lines: Lines, is_usable: list[bool] | None = None) -> None:
        """Give lent channels back; without ``is_usable`` none is used again."""
        self._channels.give_back(lines.members, lines.channels, is_usable or [False] * len(lines.channels))

    def ask(
        self,
        route: Route,
        question: Question,
        deadline: float,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> None:
        """Ask the owners in parallel, do ``meanwhile`` and take their answers.

        Returns when no key needs another answer, or when those who are silent have had their time.
        """
        lines = self.borrow(route, question.ask.owners())
        for owner in lines.others:
            question.ask.ask_together(owner)
        is_usable = None
        try:
            if lines.others or meanwhile is not do_nothing:
                is_usable = self.take_answers(
                    route, question, question.send(lines), lines, deadline, meanwhile
                )
            else:
                is_usable = question.put_to(lines, deadline - self._clock.monotonic())
        finally:
            self.give_back(lines, is_usable)
        self.account(question.ask)

    def take_answers(
        self,
        route: Route,
        question: Question,
        asked: Asked,
        lines: Lines,
        deadline: float,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> list[bool]:
        """Ask those without a line, do ``meanwhile``, and take all answers; return which channels can be used again."""
        patience = self._clock.monotonic() + SILENT_OWNER_S
        if lines.others:
            self._ask_by_both_paths(route, question, asked, lines.others, deadline, meanwhile)
        else:
            meanwhile()
            now = self._clock.monotonic()
            asked.wait(deadline - now, patience - now)
        return asked.end(patience - self._clock.monotonic())

    def account(self, ask: _native.AskBatch) -> None:
        """Count who was silent; raises :class:`~p2pkv.errors.ClosedError` if the call was cut short."""
        if self._control.is_closed:
            raise ClosedError("the node is closed")
        self._metrics.silent_owners.inc(len(ask.silent()))

    def _ask_by_both_paths(
        self,
        route: Route,
        question: Question,
        asked: Asked,
        others: list[int],
        deadline: float,
        meanwhile: Callable[[], None],
    ) -> None:
        ask = question.ask
        is_other = set(others)
        asks = [(index, owner, n) for index, (owner, n) in enumerate(ask.asks()) if owner in is_other]
        requests = [self._request(route, question, *each) for each in asks]
        patience = self._clock.monotonic() + SILENT_OWNER_S
        pending = {index for index, _, _ in asks}
        with self._control.send(requests) as calls:
            meanwhile()
            while not ask.is_settled() and (asked.is_waiting() or calls.are_pending()):
                now = self._clock.monotonic()
                if now >= deadline or (now >= patience and ask.is_heard()):
                    break
                left = (min(deadline, patience) if now < patience else deadline) - now
                if asked.is_waiting():
                    asked.wait(min(left, _TURN_S) if calls.are_pending() else left, patience - now)
                    left = _TURN_S
                if calls.are_pending() and (answer := calls.next(left)) is not None:
                    number, reply = answer
                    index = asks[number][0]
                    pending.discard(index)
                    request = requests[number]
                    if reply.ok and reply.count == request.count:
                        question.take(index, request.kind, reply)
                    elif request.kind is Kind.LOCATE and reply.status is ReplyStatus.MALFORMED:
                        # a node from before LOCATE
                        requests[number] = replace(request, kind=Kind.GET, n_holders=0)
                        calls.ask_instead(number, requests[number])
                        pending.add(index)
                    else:
                        ask.refuse(index)
        if ask.is_settled() and self._clock.monotonic() < patience:
            for index in pending:
                ask.excuse(index)

    @staticmethod
    def _request(route: Route, question: Question, index: int, owner: int, n_rows: int) -> Request:
        member = route.ring.members[owner]
        body = question.ask.body(index, question.records)
        # As over channels, so that a first look-up names all holders, too.
        if question.kind is Kind.GET and question.others is not None:
            return Request(
                member.address, Kind.LOCATE, body, n_rows, member.boot_epoch, n_holders=MOST_HOLDERS
            )
        return Request(member.address, question.kind, body, n_rows, member.boot_epoch)
