"""Where requests wait while every instance that could take them is full, instead of being sent away at once.

Who waits for the same model stands in one line. In a line the API keys with the lowest priority are served first, and
those with the same take turns, however many requests each has; of one key's the most urgent goes first, then the
oldest. The room is bounded in requests and bytes, and so is each one's time.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pkv_proxy.call import Pair
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.settings import Settings

_FULL = 429


@dataclass(order=True, slots=True)
class Ticket:
    """A request's place."""

    priority: int
    """The lowest goes first of its tenant's; tenants have priorities of their own."""
    number: int = field(default=0)
    tenant: str = field(default="", compare=False)
    nbytes: int = field(default=0, compare=False)
    """What it keeps in memory while it waits."""
    woken: asyncio.Future[None] | None = field(default=None, compare=False)


class _Line:
    """Tickets for the same instances: tenants in turn, each with its own by urgency."""

    def __init__(self, priority_of: Callable[[str], int]) -> None:
        """``priority_of`` a tenant, as it is now."""
        self._priority_of = priority_of
        self._tenants: OrderedDict[str, list[Ticket]] = OrderedDict()
        self.trying: Ticket | None = None
        """Whose turn it is now. One at a time: of several that try in vain the last would be the next."""

    def __bool__(self) -> bool:
        return bool(self._tenants) or self.trying is not None

    def push(self, ticket: Ticket, *, is_next: bool = False) -> None:
        heapq.heappush(self._tenants.setdefault(ticket.tenant, []), ticket)
        if is_next:
            self._tenants.move_to_end(ticket.tenant, last=False)

    def wake(self) -> None:
        """Let the next one try."""
        if self.trying is None and self._tenants:
            self.trying = ticket = self._pop()
            if ticket.woken is not None and not ticket.woken.done():
                ticket.woken.set_result(None)

    def _pop(self) -> Ticket:
        tenant = min(self._tenants, key=self._priority_of)  # of equals the first: whose turn it is
        tickets = self._tenants.pop(tenant)
        ticket = heapq.heappop(tickets)
        if tickets:
            self._tenants[tenant] = tickets  # behind all others
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take out one that had nothing; if it was its turn, that is its tenant's next one's now."""
        was_trying = self.trying is ticket
        self.remove(ticket)
        if was_trying:
            if ticket.tenant in self._tenants:
                self._tenants.move_to_end(ticket.tenant, last=False)
            self.wake()

    def remove(self, ticket: Ticket) -> None:
        if self.trying is ticket:
            self.trying = None
        tickets = self._tenants.get(ticket.tenant, [])
        if ticket in tickets:
            tickets.remove(ticket)
            heapq.heapify(tickets)
            if not tickets:
                del self._tenants[ticket.tenant]


class WaitingRoom:
    """All lines. One event loop uses it; :meth:`wake` must be called when an instance may have room again."""

    def __init__(
        self, settings: Settings, metrics: Metrics, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``now``: the time by which the loop's timers go."""
        self.settings = settings
        """Others may take their place: for who comes then, but priorities for all."""
        self._now = now
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._n_tickets = 0
        self._n_waiting = 0
        self._nbytes = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._n_waiting

    async def choose(self, choose: Callable[[], Pair], line: str, ticket: Ticket) -> Pair:
        """Return what ``choose`` returns, as soon as it does not say that all are full and it is the ticket's turn.

        Raises :class:`RefusedError`: the one of ``choose``, or where there is no room here, or no time left.
        """
        refusal = RefusedError(_FULL, "every instance has as many requests as it may, and others wait", 1)
        if line not in self._lines:
            try:
                return choose()
            except RefusedError as error:
                if error.status != _FULL:
                    raise
                refusal = error
        if not self._has_room(ticket.nbytes):
            raise refusal
        began = self._now()
        self._n_tickets += 1
        self._n_waiting += 1
        self._nbytes += ticket.nbytes
        ticket.number = self._n_tickets
        try:
            return await self._wait(choose, line, ticket, began + self.settings.queue_timeout, refusal)
        finally:
            self._n_waiting -= 1
            self._nbytes -= ticket.nbytes
            self._leave(line, ticket)
            self._metrics.queued.observe(self._now() - began)

    def wake(self) -> None:
        """Let the next one of each line try."""
        for line in self._lines.values():
            line.wake()

    async def _wait(
        self, choose: Callable[[], Pair], line: str, ticket: Ticket, until: float, refusal: RefusedError
    ) -> Pair:
        place = self._lines.setdefault(line, _Line(self._priority_of))
        is_next = False
        while True:
            ticket.woken = asyncio.get_running_loop().create_future()
            place.push(ticket, is_next=is_next)
            await asyncio.wait({ticket.woken}, timeout=max(0.0, until - self._now()))
            if not ticket.woken.done():
                raise refusal
            try:
                pair = choose()
            except RefusedError as error:
                if error.status != _FULL:
                    raise
                is_next = True  # nothing has changed for it: it keeps its place
                place.trying = None
            else:
                place.remove(ticket)
                place.wake()  # there may be room for more
                return pair

    def _priority_of(self, tenant: str) -> int:
        return self.settings.priorities.get(tenant, 0)

    def _has_room(self, nbytes: int) -> bool:
        settings = self.settings
        return self._n_waiting < settings.queue_length and self._nbytes + nbytes <= settings.queue_bytes

    def _leave(self, name: str, ticket: Ticket) -> None:
        line = self._lines.get(name)
        if line is None:
            return
        line.leave(ticket)
        if not line:
            del self._lines[name]
