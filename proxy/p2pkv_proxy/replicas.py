"""The routers beside this one: found by what engines and they themselves say, told of this one's load as it changes.

They speak as engines do: messages to each other's heartbeat address, under CURVE with the cluster's keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import zmq

from p2pkv.control.secret import ClusterKeys
from p2pkv.errors import ConfigError
from p2pkv.instances.teller import Teller
from p2pkv.limited_log import LimitedLog
from p2pkv_proxy.shared_load import MOST_REPLICAS, SHARE_S, Counts, HeardLoad, ReplicaLoad, ToldLoad

_log = logging.getLogger(__name__)
_FORGOTTEN_S = 30.0
"""A replica's address that nobody has named for so long is given up."""


class Channel(Protocol):
    """To another router: a :class:`Teller`."""

    is_connected: bool

    def send(self, message: bytes) -> bool:
        """Send it unless that would wait; whether it was."""

    def close(self) -> None:
        """Hang up."""


class Replicas:
    """Shares this router's load with the others. One event loop uses it; :meth:`run` must run, then :meth:`close`.

    ``own`` returns what this router has under way; ``tell`` is called with those sums of the others' that may have
    changed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        address: str,
        own: Callable[[], Counts],
        tell: Callable[[Counts], None],
        *,
        named: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
        connect: Callable[[str], Channel] | None = None,
    ) -> None:
        """``address``: where others reach this one; empty: they can't. ``named`` are the operator's.

        ``connect`` returns a channel to another one's address; raises :class:`ConfigError` if there can't be one.
        """
        self._own = own
        self._tell = tell
        self._now = now
        self._named = frozenset(named)
        self._log = LimitedLog(_log)
        self.told = ToldLoad(address)
        self.heard = HeardLoad(self.told.replica)
        self.refused = 0
        """Messages that were not taken."""
        self.n_expired = 0
        """Replicas that fell silent without a word."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connect = connect or (
            lambda address: Teller(self._context, address, keys, who="this router's load")
        )
        self._tellers: dict[str, Channel] = {}
        self._known: dict[str, float] = {}  # when each address was named last
        for replica in self._named:
            self._add(replica)

    @property
    def n_told(self) -> int:
        """Replicas that take what this one says."""
        return sum(teller.is_connected for teller in self._tellers.values())

    def found(self, addresses: Iterable[str]) -> None:
        """Note that somebody has named these routers."""
        now = self._now()
        for address in addresses:
            if address in self._tellers:
                self._known[address] = now
            elif address != self.told.address and len(self._tellers) < MOST_REPLICAS:
                self._known[address] = now
                self._add(address)

    def note(self, load: ReplicaLoad) -> bool:
        """Take what another one has said; whether it was taken."""
        if not self.heard.note(load, self._now()):
            self.refused += 1
            return False
        self.found([address for address in (load.address, *load.beside) if address])
        self._pass_on()
        return True

    def pass_on(self, beat: bytes, told: Collection[str]) -> None:
        """Tell the others of an instance's heartbeat, but for the routers ``told``, which had it from the instance."""
        untold = [teller for address, teller in self._tellers.items() if address not in told]
        message = self.told.passed_on(beat) if untold else None
        if message is not None:
            for teller in untold:
                teller.send(message)

    async def run(self) -> None:
        """Tell the others, and forget those that say nothing, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + SHARE_S
            await asyncio.sleep(SHARE_S)
            self.turn(max(0.0, loop.time() - due))

    def turn(self, late: float = 0.0) -> None:
        """Do what is due. ``late``: for so many seconds this process has listened to nobody."""
        now = self._now()
        gone = self.heard.expire(now, late)
        if gone:
            self.n_expired += len(gone)
            self._log.warning("silent", "another router has fallen silent; its load counts no more")
        self._pass_on()
        for message in self.told.messages(self._own(), now, self.heard.addresses()):
            for teller in self._tellers.values():
                teller.send(message)
        self._give_up(now)

    def _pass_on(self) -> None:
        if changed := self.heard.take_changed():
            self._tell(changed)

    def _add(self, address: str) -> None:
        try:
            self._tellers[address] = self._connect(address)
        except (ConfigError, zmq.ZMQError) as error:
            _log.warning("another router can't be told at %s: %s", address[:100], error)
            self._known.pop(address, None)
            return
        _log.info("another router takes messages at %s", address)

    def _give_up(self, now: float) -> None:
        for address in [address for address, at in self._known.items() if now - at > _FORGOTTEN_S]:
            del self._known[address]
            if address not in self._named:
                self._tellers.pop(address).close()

    def close(self) -> None:
        """Say good-bye. Idempotent."""
        if not self._context.closed:
            last = self.told.good_bye()
            for teller in self._tellers.values():
                teller.send(last)
                teller.close()
            self._tellers.clear()
            self._context.term()
