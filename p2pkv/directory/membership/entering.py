"""How an engine without a registry becomes a member, and how it leaves.

It settles at an address, asks those it can find for all they know, claims a boot epoch above every earlier one of its
id, and is a member from the moment when it answers. Then the loop of :mod:`.probing` runs, until it says good-bye.
A node that was expelled meanwhile enters again when nobody has its id any more.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import abstractmethod
from dataclasses import replace

from p2pkv.directory.membership.base import ProbeReply
from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.membership.entry import claim_boot_epoch, own_record
from p2pkv.directory.membership.expulsion import Expulsion
from p2pkv.directory.membership.health import Health
from p2pkv.directory.membership.probing import ProbingMembership
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.telling import FAN_OUT, key_and_boot
from p2pkv.directory.view import Report
from p2pkv.errors import DuplicateNodeError, MembershipError

log = logging.getLogger(__name__)


class EnteringMembership(ProbingMembership):
    """Starts and ends the loop. Subclasses say where the cluster is to be found."""

    _expulsion: Expulsion | None = None

    @abstractmethod
    def _settle(self) -> str:
        """Return the address to be known by; raise MembershipError if there is none."""

    @abstractmethod
    def _contacts(self) -> list[str]:
        """Return the addresses to find the cluster at."""

    def _reports(self, deadline: float) -> list[Report]:
        """Return what is told to a node that starts. Need not be overridden."""
        return self._ask(self._contacts(), deadline)

    def _announced(self, roster: Roster, deadline: float) -> None:
        """Do what is to be done once this node answers, before it introduces itself. Need not be overridden."""

    def start(self, deadline_s: float) -> None:
        self.enter(deadline_s)
        self._await_agreement()
        self._thread = threading.Thread(target=self._run, name="p2pkv-membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if not self._closing.acquire(blocking=False):
            return
        self._network.wake()
        # a listener may close us from within our own thread: that one ends when the listener returns
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._roster is not None and self._roster.expelled is None:
            self._leave(self._roster)
        self._network.withdraw()

    def enter(self, deadline_s: float) -> None:
        """Become a member as ``start`` does, without a thread: whoever calls this calls :meth:`step` too."""
        if self._roster is not None or self._stopping.is_set():
            raise MembershipError("this membership was started or closed before; build another one")
        deadline = self._clock.monotonic() + deadline_s
        address = self._settle()
        own = own_record(self._identity, address)
        reports = self._reports(deadline)
        if not reports and self._messages.foreign:
            raise MembershipError(
                f"who answers at {', '.join(self._contacts())} is of cluster "
                f"{', '.join(map(repr, sorted(self._messages.foreign)))}, this node of cluster "
                f"{self._identity.cluster!r}; set `cluster` or `join` right"
            )
        claim = claim_boot_epoch(
            self._network,
            self._identity,
            reports,
            address,
            clock=self._clock,
            timing=self._timing,
            deadline=deadline,
        )
        self._listeners.on_claimed(claim)
        self._punctuality.lateness()
        own = replace(own, boot_epoch=claim.boot_epoch, kept_since=claim.kept_since)
        roster = Roster(own, self._timing.burial)
        for report in reports:
            self._believe(roster, report)
        self._serve(roster)
        self._network.announce(*key_and_boot(roster.own))
        self._announced(roster, deadline)
        self._exchange(roster, [peer.address for peer in self._sample(roster.view().alive(), roster)])
        self._meet_rival(roster)
        if roster.expelled is not None:
            self._network.withdraw()
            raise DuplicateNodeError(roster.expelled)
        self._roster = roster
        self._commit(roster)
        self._news.take()  # the introduction above told it
        self._next_round = self._clock.monotonic()
        self._punctuality.lateness()

    def _await_agreement(self) -> None:
        """Return when every peer that answers believes what we do, or after ``Timing.agreement`` seconds.

        A peer's native thread takes our view at once, its engine a little later; until then nothing that this
        node publishes would count there.
        """
        roster = self._roster
        assert roster is not None
        until = self._clock.monotonic() + self._timing.agreement
        while self._clock.monotonic() < until and roster.expelled is None:
            peers = [peer.address for peer in self._sample(roster.view().alive(), roster)]
            replies = self._network.probe(peers, self._timing.probe_timeout) if peers else []
            behind = [
                address
                for address, reply in zip(peers, replies, strict=True)
                if reply is not None and reply.digest != self._view.digest
            ]
            if not behind:
                break
            for blob in self._network.received(0.005):
                self._learn(roster, blob)
            self._exchange(roster, behind)
            self._commit(roster)
        self._next_round = self._clock.monotonic()
        self._punctuality.lateness()

    def _wait_outside(self, roster: Roster) -> float:
        """Ask for whoever has this node's id, and enter again once nobody has."""
        assert roster.successor is not None, "who is expelled is so for another"
        started = self._clock.monotonic()
        late = self._punctuality.lateness()
        if self._expulsion is None:
            self._expulsion = Expulsion(roster.successor, self._timing, self._random, started)
        expulsion = self._expulsion
        if late:
            expulsion.overslept()
        if started >= expulsion.due:
            self._punctuality.promise(self._timing.probe_timeout)
            reply = self._network.probe([expulsion.successor.address], self._timing.probe_timeout)[0]
            if reply is None:
                reply = self._late_reply(expulsion.successor.address)
            late, now = self._punctuality.lateness(), self._clock.monotonic()
            if reply is not None and reply.node_key == roster.own.key:
                expulsion.answered(now)
            elif late:
                expulsion.overslept()
            else:
                expulsion.silent(started, now)
                if expulsion.is_over(now, alone=False):
                    self._enter_again(roster, expulsion)
        wait = max(0.0, expulsion.due - self._clock.monotonic()) if roster.expelled is not None else 0.0
        self._punctuality.promise(wait)
        return wait

    def _late_reply(self, address: str) -> ProbeReply | None:
        """Return what an address has answered to an earlier probe, late, if it has."""
        late = [answer.reply for answer in self._network.late(1.0) if answer.address == address]
        return next((reply for reply in reversed(late) if reply is not None), None)

    def _enter_again(self, roster: Roster, expulsion: Expulsion) -> None:
        """Be a member again, above every boot that is known, unless peers still count on another one."""
        own = roster.own
        others = [member.address for member in roster.view().present() if member.node_id != own.node_id]
        some = self._random.sample(others, min(FAN_OUT, len(others)))
        asked = [address for address in dict.fromkeys([*self._contacts(), *some]) if address != own.address]
        self._punctuality.promise(self._timing.probe_timeout + self._timing.exchange_timeout)
        reports = self._ask(asked, math.inf)
        self._punctuality.lateness()
        if expulsion.has_successor(reports, own.address):
            return
        if not expulsion.is_over(self._clock.monotonic(), alone=not reports):
            return
        try:
            address = self._settle()
        except MembershipError as error:
            log.info("nobody has node id %s any more, but it can't come back yet: %s", own.node_id, error)
            return
        roster.reboot(max(expulsion.successor.boot_epoch, own.boot_epoch) + 1, address)
        # what was measured was before
        self._detector, self._health = FailureDetector(self._timing), Health(self._timing)
        self._network.late(0.0)
        self._late.clear()
        for report in reports:
            self._believe(roster, report)
        self._counts["reboots"] += 1
        self._listeners.on_reboot(roster.own.boot_epoch)
        if self._stopping.is_set():
            return
        log.warning(
            "nobody has node id %s at %s any more: this node is a member again, under boot epoch %d",
            own.node_id,
            expulsion.successor.address,
            roster.own.boot_epoch,
        )
        self._serve(roster)
        self._network.announce(*key_and_boot(roster.own))
        roster.expelled = roster.successor = self._expulsion = None
        self._commit(roster)
        self._next_round = self._clock.monotonic()
        self._punctuality.lateness()

    def _ask(self, contacts: list[str], deadline: float) -> list[Report]:
        """Return what those present at the contacts tell; they learn nothing of us yet."""
        left = max(0.0, deadline - self._clock.monotonic())
        replies = self._network.probe(contacts, min(self._timing.probe_timeout, left)) if contacts else []
        present = [address for address, reply in zip(contacts, replies, strict=True) if reply is not None]
        if not present:
            return []
        left = max(0.0, deadline - self._clock.monotonic())
        nothing = self._messages.news()
        blobs = self._network.exchange(present, nothing, min(self._timing.exchange_timeout, left))
        reports = (self._messages.read(blob) for blob in blobs if blob is not None)
        return [report for report in reports if report is not None]

    def _leave(self, roster: Roster) -> None:
        peers = [member.address for member in roster.view().present() if member.node_id != roster.own.node_id]
        roster.leave(self._clock.monotonic())
        self._serve(roster)
        if peers:
            blob = self._messages.news([roster.own])
            # told, not exchanged: each of them would answer with its whole view
            self._network.tell([(address, blob) for address in peers], self._timing.leave_timeout)
