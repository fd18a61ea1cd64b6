"""The real directory of several nodes in one thread: native shards, clients and announcers, in virtual time.

::

    client = DirectoryClient(own_key=..., shard=shard, client=SimulatedControl(reach, clock), channels=NoChannels(),
                             replicas=2, metrics=metrics, clock=clock)
    announcer = Announcer(pool, client, metrics, clock=clock)  # and never announcer.start()

Whoever drives it sets every shard's time (``shard.set_time(int(clock.now))``), calls ``announcer.step()`` when the
seconds that the last call returned have passed, ``announcer.tell_changed(idle=0.0, gather=0.0)`` a few times a second,
``shard.sweep()`` ten times a second, and ``client.set_view`` when a view changes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, Reply, pack_request, unpack_reply
from p2pkv.directory.view import Member, View
from p2pkv.testing.simulated_network import LATENCY, SimulatedClock

if TYPE_CHECKING:
    from typing_extensions import Self

Reach = Callable[[str], "tuple[_native.Shard, int] | None"]
"""An address to the shard that answers there and its node's boot epoch; None: nobody answers."""


class SimulatedControl:
    """Satisfies :class:`~p2pkv.directory.paths.ControlPath`: shards in reach have answered after :data:`LATENCY`."""

    def __init__(self, reach: Reach, clock: SimulatedClock) -> None:
        self._reach = reach
        self._clock = clock
        self.is_closed = False
        self.n_requests = 0
        self.n_records: Counter[Kind] = Counter()
        """Sent in requests of each kind, answered or not."""

    def send(self, requests: Sequence[Request]) -> SimulatedAnswers:
        """Have every shard in reach do what it is asked."""
        self.n_requests += len(requests)
        for request in requests:
            self.n_records[request.kind] += request.count
        return SimulatedAnswers(requests, self._answer, self._clock)

    def _answer(self, request: Request) -> Reply | None:
        found = self._reach(request.address)
        if found is None:
            return None
        shard, boot = found
        message = pack_request(
            request.kind,
            1,
            boot=request.boot,
            count=request.count,
            body=request.body,
            n_holders=request.n_holders,
        )
        return unpack_reply(self._exchange(shard, boot, request, message), request.kind, 1)

    def _exchange(self, shard: _native.Shard, boot: int, request: Request, message: bytes) -> bytes:
        """Return what the shard says to the message that ``request`` has become; here whoever counts has a look."""
        return shard.answer(message, boot)


class SimulatedAnswers:
    """What came back; a wait for what did not moves the asking node's clock."""

    def __init__(
        self, requests: Sequence[Request], answer: Callable[[Request], Reply | None], clock: SimulatedClock
    ) -> None:
        self._clock = clock
        self._answer = answer
        self._coming: deque[tuple[float, int, Reply]] = deque()
        self._n_silent = 0
        for index, request in enumerate(requests):
            self.ask_instead(index, request)

    def ask_instead(self, index: int, request: Request) -> None:
        """Ask, too."""
        reply = self._answer(request)
        if reply is None:
            self._n_silent += 1
        else:
            self._coming.append((self._clock.now + LATENCY, index, reply))

    def next(self, timeout: float) -> tuple[int, Reply] | None:
        """Return an answer, or let ``timeout`` pass; those that were asked at once answer at once."""
        if self._coming:
            wait = max(0.0, self._coming[0][0] - self._clock.now)
            self._clock.now += min(max(timeout, 0.0), wait)
            return self._coming.popleft()[1:] if timeout >= wait else None
        if self._n_silent:
            self._clock.now += max(timeout, 0.0)
        return None

    def are_pending(self) -> bool:
        """Whether some request has not been answered."""
        return bool(self._coming) or self._n_silent > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._coming.clear()


class NoChannels:
    """Satisfies :class:`~p2pkv.directory.paths.ChannelPath`: all goes over the control socket."""

    def set_view(self, view: View) -> None:
        """Do nothing."""

    def borrow(self, members: Sequence[Member]) -> list[_native.DirectoryChannel | None]:
        """Have a channel to nobody."""
        return [None] * len(members)

    def give_back(
        self,
        members: Sequence[Member],
        channels: Sequence[_native.DirectoryChannel],
        is_usable: Sequence[bool],
    ) -> None:
        """Do nothing: nothing was lent."""

    def release(self, member: Member, lease: int, seconds: float) -> None:
        """Leave the lease to time."""

    def touch(self, member: Member, keys: NDArray[np.uint8]) -> int:
        """Tell nobody."""
        return 0
