"""The join addresses: where nodes that know nothing of each other meet.

The first process of a host to find one of its addresses free takes it. Every node keeps probing all of
them, with jitter, so that clusters that grew apart find each other; an address that went silent is taken
over by whichever live process of that host notices first.

A name may stand for many nodes, this one among them, and for others tomorrow: every number behind it is a join
address, and the name is asked for again all the time (:class:`p2pkv.control.host_names.Names` does so every 30 s).
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from random import Random

from p2pkv.directory.membership.base import Network
from p2pkv.directory.membership.timing import Timing

log = logging.getLogger(__name__)

_SILENCES_TO_WARN = 5
"""Five seconds or so: a restart of the address's holder takes less."""
_BACK_OFF = 4
"""How many times as many silences come before the next warning of the same outage: after 5, 20, 80 seconds or so."""
_MAX_SILENCES = 3600
"""Whatever the back-off, somebody who looks at an hour of the log finds the reason there."""


class JoinAddresses:
    """When to probe which join address, and which of them are ours."""

    def __init__(self, addresses: Sequence[str], network: Network, timing: Timing, random: Random) -> None:
        self._network = network
        self._timing = timing
        self._random = random
        self._configured = tuple(dict.fromkeys(addresses))
        self._due: dict[str, float] = {}
        self._silences: Counter[str] = Counter()
        self._warn_at: dict[str, int] = {}  # the number of silences at which to say so again
        self._n_alone = 0
        self.held: set[str] = set()
        """Those that lead to this very process."""

    @property
    def lead_elsewhere(self) -> bool:
        """Whether some are not this process's own, or not known yet. From any thread."""
        addresses = list(self._due)
        return bool(self._configured) and not (addresses and self.held.issuperset(addresses))

    def take_free(self) -> None:
        """Serve every address that is this host's and free."""
        for address in self.others():
            self.silent(address, is_alone=True)

    def others(self) -> list[str]:
        """Return the addresses, of all the names there are, that are not ours."""
        addresses = [found for name in self._configured for found in self._network.resolve(name)]
        self._due = {address: self._due.get(address, 0.0) for address in addresses}
        return [address for address in self._due if address not in self.held]

    def due(self, now: float) -> list[str]:
        """Return the addresses to probe now, and put off their next turn."""
        addresses = [address for address in self.others() if self._due[address] <= now]
        for address in addresses:
            # jitter: all nodes would otherwise probe, and take over, in step
            self._due[address] = now + self._timing.join_interval * self._random.uniform(0.75, 1.25)
        return addresses

    def alone(self) -> None:
        """Say, once, that this node knows nobody and has nobody to look for."""
        n_own = len(self._due) if all(address in self.held for address in self._due) else 0
        if n_own and n_own != self._n_alone:
            which = "the join address is" if n_own == 1 else f"all {n_own} join addresses are"
            log.info("alone so far: %s this node's own, for others to find it", which)
        self._n_alone = n_own

    def answered(self, address: str) -> None:
        """Take notice that somebody is there: if it goes silent again, that is another outage."""
        self._silences.pop(address, None)
        if self._warn_at.pop(address, _SILENCES_TO_WARN) > _SILENCES_TO_WARN:
            log.info("join address %s answers", address)

    def silent(self, address: str, *, is_alone: bool) -> None:
        """Take over a join address nobody answers at, if it is this host's and free.

        ``is_alone``: this node knows no other that is there.
        """
        if address not in self._due:  # a member's
            return
        if address == self._network.address or self._network.listen_also(address):
            self.held.add(address)
            return
        self._silences[address] += 1
        n, warn_at = self._silences[address], self._warn_at.get(address, _SILENCES_TO_WARN)
        if n >= warn_at:
            self._warn_at[address] = n + min(_MAX_SILENCES, n * (_BACK_OFF - 1))
            # a name goes on standing for some that are gone, and for those that listen on its other kind of address
            level = logging.WARNING if address in self._configured else logging.INFO
            self._network.why_silent(address, functools.partial(_say, level, address, is_alone))


def _say(level: int, address: str, is_alone: bool, why: str) -> None:
    log.log(
        level,
        "no node answers at join address %s, and it can't be taken over from here: %s; %s",
        address,
        why,
        "this node is alone: all that others have is a miss, until somebody answers (p2pkv status --join asks again)"
        if is_alone
        else "this node goes on without it",
    )
