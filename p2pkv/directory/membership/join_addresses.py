"""The join addresses: where nodes that know nothing of each other meet.

The first process of a host to find one of its addresses free takes it. Every node keeps probing all of
them, with jitter, so that clusters that grew apart find each other; an address that went silent is taken
over by whichever live process of that host notices first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from random import Random

from p2pkv.directory.membership.base import Network
from p2pkv.directory.membership.timing import Timing

log = logging.getLogger(__name__)

_SILENCES_TO_WARN = 5
"""Five seconds or so: a restart of the address's holder takes less."""


class JoinAddresses:
    """When to probe which join address, and which of them are ours."""

    def __init__(self, addresses: Sequence[str], network: Network, timing: Timing, random: Random) -> None:
        self._network = network
        self._timing = timing
        self._random = random
        self._due = dict.fromkeys(addresses, 0.0)
        self._silences: Counter[str] = Counter()
        self.held: set[str] = set()
        """Those that lead to this very process."""

    def take_free(self) -> None:
        """Serve every address that is this host's and free."""
        for address in self.others():
            self.silent(address)

    def others(self) -> list[str]:
        """Return the addresses that are not ours."""
        return [address for address in self._due if address not in self.held]

    def due(self, now: float) -> list[str]:
        """Return the addresses to probe now, and put off their next turn."""
        addresses = [address for address in self.others() if self._due[address] <= now]
        for address in addresses:
            # jitter: all nodes would otherwise probe, and take over, in step
            self._due[address] = now + self._timing.join_interval * self._random.uniform(0.75, 1.25)
        return addresses

    def silent(self, address: str) -> None:
        """Take over an address nobody answers at, if it is this host's and free."""
        if address in self._due and (address == self._network.address or self._network.listen_also(address)):
            self.held.add(address)
            return
        self._silences[address] += 1
        if self._silences[address] == _SILENCES_TO_WARN:
            log.warning(
                "no node answers at join address %s, and it can't be taken over from here (another machine's, or "
                "another program's); this node goes on without it",
                address,
            )
