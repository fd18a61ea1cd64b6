"""Membership by a registry: nodes find each other by the records that they leave in a store outside the cluster.

The registry says who there might be; everything else is as in :mod:`.embedded`. A record makes nobody a member by
itself: the node it tells of has to answer a probe, under its id and in that boot, over a connection that nobody
without the secret can answer. So a store that was restored from a backup, or is written by a stranger, brings nobody
back. And a record that goes makes nobody dead: a lease runs out as well where an interpreter was held, or where the
store was away. Who lives is found out by probes, and told from node to node, which goes on without the store.

The registry also settles whose an id is: a name is written over what was read before, or not at all.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

from p2pkv.directory.membership.base import Identity, Listeners, Network, ProbeReply
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.entry import claim_boot_epoch
from p2pkv.directory.membership.probing import Targets
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.telling import key_and_boot
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.registry.store import Listing, Registry
from p2pkv.directory.view import Member, Report
from p2pkv.errors import RegistryError, VersionError, ViewError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_ASKED_AT_START = 8
"""Nodes of the registry that a starting node asks for all they know; some may be gone."""
_PER_ROUND = 32
"""Nodes of the registry that are probed in one round, of those that are no members yet: newcomers before all others,
then those who have waited longest."""
_LONGEST_WAIT_S = 8.0
"""Between two probes of one that does not answer: its record is there until its lease ends. It is longer where so many
are silent that they would take more than half of the rounds."""
_ADVICE = "the setting membership names the store, and p2pkv doctor tries it out from here"
_MOST_CLAIMS = 4
"""So many others of one id may start in the same moment."""


@dataclass(slots=True)
class _Candidate:
    """A record that says more than is known."""

    member: Member
    due: float
    pause: float
    was_asked: bool = False


class RegisteredMembership(EmbeddedMembership):
    """Joins those whose records are in the registry, and whoever answers at ``join``."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        registry: Registry,
        seal: Seal,
        join: Sequence[str] = (),
        listeners: Listeners | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(
            network, identity, join=join, listeners=listeners, clock=clock, timing=timing, random=random
        )
        self._registry = registry
        self._seal = seal
        self._heard = Listing({})
        self._records: dict[str, Member] = {}
        self._candidates: dict[str, _Candidate] = {}
        self._registered: Member | None = None
        self._is_usable = False
        self._n_refused = 0
        self._limited = LimitedLog(_log, clock=self._clock.monotonic)

    # the interface

    @property
    def is_alone(self) -> bool:
        others = self._records.keys() - {self._identity.node_id}
        return len(self._view.present()) == 1 and (super().is_alone or bool(others))

    def counters(self) -> dict[str, int]:
        return {
            **super().counters(),
            **self._registry.counters(),
            "p2pkv_registry_records": len(self._records),
            "p2pkv_registry_refused_records_total": self._n_refused,
        }

    def enter(self, deadline_s: float) -> None:
        with ExitStack() as undo:
            undo.callback(self._registry.close)
            super().enter(deadline_s)
            undo.pop_all()

    def close(self) -> None:
        self._registry.publish(None)  # while the peers are told
        super().close()
        self._registry.close()

    # entering

    def _reports(self, deadline: float) -> list[Report]:
        failure = None
        # half of the time, so that the join addresses are asked in any case
        left = max(0.0, deadline - self._clock.monotonic()) / 2
        try:
            self._registry.open(self._identity.node_id, self._outranks, self._network.wake, left)
            self._is_usable = True
        except RegistryError as error:
            failure = error
        self._read()
        reports = super()._reports(deadline)
        if failure is not None and not reports:
            raise RegistryError(f"{failure}; {_ADVICE}") from failure
        if failure is not None:
            _log.warning(
                "%s; this node joins by its join addresses, and is registered once it answers", failure
            )
        own = self._records.get(self._identity.node_id)
        return reports if own is None else [*reports, Report(own.node_id, (own,), self._identity.cluster)]

    def _announced(self, roster: Roster, deadline: float) -> None:
        if not self._is_usable:
            return
        with ExitStack() as undo:
            undo.callback(self._network.withdraw)
            self._claim(roster, deadline)
            undo.pop_all()

    def _claim(self, roster: Roster, deadline: float) -> None:
        """Take this node's name in the registry, unless a living node has it."""
        over = {self._heard.values.get(self._identity.node_id, b"")}
        for _ in range(_MOST_CLAIMS):
            left = max(0.0, deadline - self._clock.monotonic())
            try:
                in_the_way = self._registry.claim(self._seal.close(roster.own), over, left)
            except RegistryError as error:
                raise RegistryError(f"{error}; {_ADVICE}") from error
            if in_the_way is None:
                self._registered = roster.own
                return
            over.add(in_the_way)
            self._outbid(roster, in_the_way, deadline)
        raise RegistryError(
            f"node id {self._identity.node_id!r} is being taken by others in {self._registry.where}"
        )

    def _outbid(self, roster: Roster, value: bytes, deadline: float) -> None:
        """Go on above the record that was written since ours was decided on, if nobody answers for it."""
        record = self._open(self._identity.node_id, value)
        if record is None:
            return
        claim = claim_boot_epoch(
            self._network,
            self._identity,
            [Report(record.node_id, (record,))],
            roster.own.address,
            clock=self._clock,
            timing=self._timing,
            deadline=deadline,
        )
        # what is asked here is one record: of what others said before the later life counts
        claim = claim._replace(kept_since=max(claim.kept_since, roster.own.kept_since))
        self._listeners.on_claimed(claim)
        roster.reboot(claim.boot_epoch, kept_since=claim.kept_since)
        self._serve(roster)
        self._network.announce(*key_and_boot(roster.own))

    def _outranks(self, ours: bytes, theirs: bytes) -> bool:
        """Whether our record may replace another of this node's name; from the registry's thread."""
        own = self._seal.open(ours)
        try:
            there = self._seal.open(theirs)
        except (ViewError, VersionError):
            return True
        # a stranger may have put the record of another node there
        return there.node_id != own.node_id or own.precedence > there.precedence

    # the loop

    def step(self, blobs: Sequence[bytes]) -> float:
        roster = self._roster
        if roster is not None and not self._stopping.is_set():
            self._read()
            own = self._records.get(self._identity.node_id)
            if own is not None and roster.expelled is None:
                roster.take(own, now=self._clock.monotonic(), is_proven=lambda member: False)
        wait = super().step(blobs)
        if roster is not None and not self._stopping.is_set():
            self._register(roster)
        return wait

    def _register(self, roster: Roster) -> None:
        own = None if roster.expelled is not None else roster.own
        if own is not self._registered:
            self._registered = own
            self._registry.publish(None if own is None else self._seal.close(own))

    def _contacts(self) -> list[str]:
        others = [member.address for name, member in self._records.items() if name != self._identity.node_id]
        some = self._random.sample(others, min(_ASKED_AT_START, len(others)))
        return list(dict.fromkeys([*super()._contacts(), *some]))

    def _targets(self, now: float) -> Targets:
        targets = super()._targets(now)
        for name, candidate in list(self._candidates.items()):
            if not self._is_news(candidate.member):
                del self._candidates[name]
        n_rounds = len(self._candidates) / _PER_ROUND
        longest = max(_LONGEST_WAIT_S, 2 * n_rounds * self._timing.probe_interval)
        due = [candidate for candidate in self._candidates.values() if candidate.due <= now]
        asked = heapq.nsmallest(_PER_ROUND, due, key=lambda candidate: (candidate.was_asked, candidate.due))
        for candidate in asked:
            candidate.was_asked = True
            candidate.due = now + candidate.pause * self._random.uniform(0.75, 1.25)
            candidate.pause = min(2 * candidate.pause, longest)
        addresses = [candidate.member.address for candidate in asked]
        return Targets(targets.members, [*targets.addresses, *addresses])

    def _probed(self, replies: Mapping[str, ProbeReply | None]) -> None:
        super()._probed(replies)
        assert self._roster is not None
        now = self._clock.monotonic()
        for candidate in self._candidates.values():
            member = candidate.member
            reply = replies.get(member.address)
            if reply is not None and (reply.node_key, reply.boot_epoch) == key_and_boot(member):
                self._roster.take(member, now=now, is_proven=lambda _: True)

    # the records

    def _read(self) -> None:
        """Take in what has changed in the registry."""
        listing = self._registry.listing()
        before, self._heard = self._heard.values, listing
        if listing.values is before:
            return
        for name in before.keys() - listing.values.keys():
            self._records.pop(name, None)
            self._candidates.pop(name, None)
        now = self._clock.monotonic()
        for name, value in listing.values.items():
            if before.get(name) == value:
                continue
            self._candidates.pop(name, None)
            self._records.pop(name, None)
            member = self._open(name, value)
            if member is not None:
                self._records[name] = member
                if self._is_news(member):
                    self._candidates[name] = _Candidate(member, now, self._timing.join_interval)

    def _open(self, name: str, value: bytes) -> Member | None:
        try:
            member = self._seal.open(value)
            if member.node_id != name:
                raise ViewError(f"it is that of node {member.node_id!r}, under another's name")
        except (ViewError, VersionError) as error:
            self._n_refused += 1
            self._limited.warning(
                "refused", "the record of %r in %s is refused: %s", name[:128], self._registry.where, error
            )
            return None
        return member

    def _is_news(self, member: Member) -> bool:
        """Whether a record tells of a node, a boot or an incarnation that this node has not heard of."""
        if member.node_id == self._identity.node_id or not member.is_present:
            return False
        known = self._roster.view().get(member.node_id) if self._roster is not None else None
        return known is None or member.precedence[:2] > known.precedence[:2]
