"""Membership by configuration: the members are the nodes at a fixed list of addresses.

Who they are is learnt from themselves; whether they live, from probing them. No node's word counts about
another, so that a view can never hold more than what was configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from p2pkv.directory.membership.base import Identity, Listeners, Network
from p2pkv.directory.membership.entering import EnteringMembership
from p2pkv.directory.membership.probing import Targets
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import Member, Report
from p2pkv.errors import MembershipError


class StaticMembership(EnteringMembership):
    """The nodes at ``join`` and no others. This node's own address must be among them, written the same way.

    One configuration may serve all: a node whose own address isn't in the list takes the first of them that
    is its host's and free.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        join: Sequence[str],
        listeners: Listeners | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(network, identity, listeners=listeners, clock=clock, timing=timing, random=random)
        self._addresses = tuple(dict.fromkeys(join))
        self._own_address = ""

    def _settle(self) -> str:
        listened = self._network.address
        free = (address for address in self._addresses if self._network.listen_also(address))
        self._own_address = listened if listened in self._addresses else next(free, "")
        if not self._own_address:
            raise MembershipError(
                f"none of the static members' addresses {', '.join(self._addresses) or '(none)'} "
                f"is this node's ({listened}) or free on this host; list it in `join`, written as in `listen`"
            )
        return self._own_address

    def _contacts(self) -> list[str]:
        return [address for address in self._addresses if address != self._own_address]

    def _targets(self, now: float) -> Targets:
        others = [member for member in self._view.present() if member.node_id != self._identity.node_id]
        asked_about = self._witness.asked_about()
        doubtful = [
            member for member in others if self._detector.is_doubtful(member) or member.node_id in asked_about
        ]
        chosen = {member.node_id: member for member in (*self._rotation.next(others), *doubtful)}
        known = {member.address for member in others}
        return Targets(list(chosen.values()), [a for a in self._contacts() if a not in known])

    def _credible(self, report: Report) -> Iterable[Member]:
        for member in report.members:
            is_teller = member.node_id == report.sender and member.address in self._addresses
            # what is said about ourselves, we must be able to deny
            if is_teller or member.node_id == self._identity.node_id:
                yield member
