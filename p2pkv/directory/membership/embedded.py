"""Membership with nothing to install: nodes find each other through join addresses, and gossip.

Any live node can be joined through, every node's word counts about every other, and there is no master. In
the manner of SWIM (Das, Gupta, Motivala: "SWIM: scalable weakly-consistent infection-style process group
membership protocol", 2002): a single broken path takes nobody off anybody's ring, since others are asked before a
member is given up, and a rumour of death doesn't outweigh an own probe that was answered just now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from p2pkv.directory.membership.base import Identity, Listeners, Network, ProbeReply
from p2pkv.directory.membership.entering import EnteringMembership
from p2pkv.directory.membership.join_addresses import JoinAddresses
from p2pkv.directory.membership.probing import Targets
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import Member, Report, State


class EmbeddedMembership(EnteringMembership):
    """Joins whatever cluster answers at ``join``; alone, it is a cluster of its own and keeps looking."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        join: Sequence[str] = (),
        listeners: Listeners | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(network, identity, listeners=listeners, clock=clock, timing=timing, random=random)
        self._join = JoinAddresses(join, network, self._timing, self._random)

    @property
    def is_alone(self) -> bool:
        return self._join.lead_elsewhere and len(self._view.present()) == 1

    def _settle(self) -> str:
        self._join.take_free()
        return self._network.address

    def _let_go(self) -> None:
        super()._let_go()
        self._join.held.clear()

    def _contacts(self) -> list[str]:
        return self._join.others()

    def _targets(self, now: float) -> Targets:
        others = [member for member in self._view.values() if member.node_id != self._identity.node_id]
        present = [member for member in others if member.is_present]
        asked_about = self._witness.asked_about()
        doubtful = [
            member
            for member in present
            if self._detector.is_doubtful(member) or member.node_id in asked_about
        ]
        chosen = {member.node_id: member for member in (*self._rotation.next(present), *doubtful)}
        addresses = self._join.due(now)
        if not others:
            self._join.alone()
        dead = [member.address for member in others if member.state is State.DEAD]
        if dead:
            # a partition may have cut us off from every join address: the other side is among our dead
            addresses.append(self._random.choice(dead))
        return Targets(list(chosen.values()), addresses)

    def _credible(self, report: Report) -> Iterable[Member]:
        return report.members

    def _probed(self, replies: Mapping[str, ProbeReply | None]) -> None:
        own = self._view.get(self._identity.node_id)
        is_alone = not any(
            member.is_present for member in self._view.values() if member.node_id != self._identity.node_id
        )
        for address, reply in replies.items():
            if reply is None:
                self._join.silent(address, is_alone=is_alone)
                continue
            self._join.answered(address)
            if own is not None and reply == ProbeReply(own.key, own.boot_epoch, self._view.digest):
                # one of our own addresses under another name
                self._join.held.add(address)
