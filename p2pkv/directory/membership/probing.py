"""What the engines without a registry share: one thread that probes, judges, and tells the peers.

A round probes many members in parallel. A peer whose digest differs from ours is exchanged views with, never
refused. A change is pushed to a few peers at once, so that news doesn't wait for the next round. Subclasses
say whom to probe and whose word counts.

:meth:`ProbingMembership.step` is one turn of the thread's loop. Tests drive it directly, on a simulated
network.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from secrets import randbits

from p2pkv.directory.membership.base import Identity, Listeners, Membership, Network, ProbeReply
from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.membership.entry import claim_boot_epoch, own_record
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.rotation import Rotation
from p2pkv.directory.membership.timing import Clock, Punctuality, SystemClock, Timing
from p2pkv.directory.view import Member, Report, State, View, decode, encode
from p2pkv.errors import DuplicateNodeError, MembershipError, VersionError, ViewError

log = logging.getLogger(__name__)

FAN_OUT = 3
"""Peers that one node tells of a change, and exchanges views with in a round: k hops reach 4**k nodes."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Whom to probe in one round."""

    members: Sequence[Member]
    """Their silence counts against them."""
    addresses: Sequence[str] = ()
    """Probed only to see who is there."""


class ProbingMembership(Membership):
    """The loop. Everything but ``_stopping`` belongs to the engine's thread once ``start`` has returned.

    The thread ``p2pkv-membership`` is started by ``start`` and joined by ``close``.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        listeners: Listeners | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        self._network = network
        self._identity = identity
        self._listeners = listeners or Listeners()
        self._clock: Clock = clock or SystemClock()
        self._timing = timing or Timing()
        self._random = random or _new_random()
        self._detector = FailureDetector(self._timing)
        self._rotation = Rotation(self._random)
        self._punctuality = Punctuality(self._clock, self._timing.lateness_tolerance)
        self._roster: Roster | None = None
        self._view = View()
        self._served: View | None = None
        self._next_round = 0.0
        self._has_news = False
        self._counts = dict.fromkeys(("malformed_views", "late_rounds", "suspicions", "deaths"), 0)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._closing = threading.Lock()  # held by whoever closes first; guards nothing else

    # what subclasses decide

    @abstractmethod
    def _settle(self) -> str:
        """Return the address to be known by; raise MembershipError if there is none."""

    @abstractmethod
    def _contacts(self) -> list[str]:
        """Return the addresses to find the cluster at."""

    @abstractmethod
    def _targets(self, now: float) -> Targets:
        """Return whom to probe now."""

    @abstractmethod
    def _credible(self, report: Report) -> Iterable[Member]:
        """Return the records of a peer's view that count."""

    def _probed(self, replies: Mapping[str, ProbeReply | None]) -> None:
        """Look at the replies of a punctual round, by address. Need not be overridden."""

    # the interface

    def start(self, deadline_s: float) -> None:
        self.enter(deadline_s)
        self._await_agreement()
        self._thread = threading.Thread(target=self._run, name="p2pkv-membership", daemon=True)
        self._thread.start()

    def view(self) -> View:
        return self._view

    @property
    def boot_epoch(self) -> int:
        return self._roster.own.boot_epoch if self._roster is not None else 0

    def counters(self) -> dict[str, int]:
        counts = {f"p2pkv_membership_{name}_total": count for name, count in self._counts.items()}
        counts["p2pkv_membership_refused_records_total"] = self._roster.n_refused if self._roster else 0
        return counts

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

    # entering and leaving

    def enter(self, deadline_s: float) -> None:
        """Become a member as ``start`` does, without a thread: whoever calls this calls :meth:`step` too."""
        if self._roster is not None or self._stopping.is_set():
            raise MembershipError("this membership was started or closed before; build another one")
        deadline = self._clock.monotonic() + deadline_s
        address = self._settle()
        own = own_record(self._identity, address)
        reports = self._ask(self._contacts(), deadline)
        boot_epoch = claim_boot_epoch(
            self._network,
            self._identity,
            reports,
            address,
            clock=self._clock,
            timing=self._timing,
            deadline=deadline,
        )
        self._punctuality.lateness()
        roster = Roster(replace(own, boot_epoch=boot_epoch), self._timing.burial)
        for report in reports:
            self._believe(roster, report)
        self._serve(roster)
        self._network.announce(*_key_and_boot(roster.own))
        self._exchange(roster, [peer.address for peer in self._sample(roster.view().alive(), roster)])
        if roster.expelled is not None:
            self._network.withdraw()
            raise DuplicateNodeError(roster.expelled)
        self._roster = roster
        self._commit(roster)
        self._has_news = False  # the introduction above told it
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

    def _ask(self, contacts: list[str], deadline: float) -> list[Report]:
        """Return what those present at the contacts tell; they learn nothing of us yet."""
        left = max(0.0, deadline - self._clock.monotonic())
        replies = self._network.probe(contacts, min(self._timing.probe_timeout, left)) if contacts else []
        present = [address for address, reply in zip(contacts, replies, strict=True) if reply is not None]
        if not present:
            return []
        left = max(0.0, deadline - self._clock.monotonic())
        nothing = encode(self._identity.node_id, ())
        blobs = self._network.exchange(present, nothing, min(self._timing.exchange_timeout, left))
        reports = (self._decode(blob) for blob in blobs if blob is not None)
        return [report for report in reports if report is not None]

    def _leave(self, roster: Roster) -> None:
        peers = [member.address for member in roster.view().present() if member.node_id != roster.own.node_id]
        roster.leave(self._clock.monotonic())
        self._serve(roster)
        if peers:
            blob = encode(roster.own.node_id, (roster.own,))
            self._network.exchange(peers, blob, self._timing.leave_timeout)

    # the loop

    def _run(self) -> None:
        try:
            wait = 0.0
            while not self._stopping.is_set():
                wait = self.step(self._network.received(wait))
        except Exception as error:
            log.exception("membership stops: this node is no member any more")
            self._network.withdraw()
            self._stopping.set()
            self._listeners.on_expelled(f"the membership engine failed: {error!r}")

    def step(self, blobs: Sequence[bytes]) -> float:
        """Take in what peers handed over and do what is due; return how many seconds the next may wait."""
        roster = self._roster
        assert roster is not None, "enter() comes first"
        if self._stopping.is_set():
            return self._timing.probe_interval
        self._forgive()
        for blob in blobs:
            self._learn(roster, blob)
        if self._clock.monotonic() >= self._next_round:
            self._round(roster)
        self._judge(roster)
        self._commit(roster)
        if self._has_news and not self._stopping.is_set():
            self._has_news = False
            self._exchange(roster, [peer.address for peer in self._sample(roster.view().alive(), roster)])
            self._commit(roster)
        due = 0.0 if self._has_news else min(self._next_round, self._detector.next_deadline())
        wait = max(0.0, due - self._clock.monotonic())
        self._punctuality.promise(wait)
        return wait

    def _round(self, roster: Roster) -> None:
        started = self._clock.monotonic()
        self._next_round = started + self._timing.probe_interval * self._random.uniform(0.9, 1.0)
        targets = self._targets(started)
        addresses = list(dict.fromkeys([*(member.address for member in targets.members), *targets.addresses]))
        if not addresses:
            return
        self._punctuality.promise(self._timing.probe_timeout)
        answers = self._network.probe(addresses, self._timing.probe_timeout)
        replies = dict(zip(addresses, answers, strict=True))
        is_late = self._forgive()
        now = self._clock.monotonic()
        for member in targets.members:
            reply = replies[member.address]
            if reply is not None and (reply.node_key, reply.boot_epoch) == _key_and_boot(member):
                self._detector.answered(member, now)
            elif not is_late and self._detector.missed(member):
                roster.suspect(member, now)
        if not is_late:
            self._probed(replies)
        digest = self._view.digest
        strange = [a for a, reply in replies.items() if reply is not None and reply.digest != digest]
        self._exchange(roster, self._random.sample(strange, min(FAN_OUT, len(strange))))

    def _judge(self, roster: Roster) -> None:
        now = self._clock.monotonic()
        self._detector.observe(roster.view(), now)
        for node_id in self._detector.overdue(now):
            roster.bury(node_id, now)
        roster.forget(now)
        self._detector.observe(roster.view(), now)

    def _forgive(self) -> bool:
        """Take out of every timer what this node slept through; true if it slept at all."""
        late = self._punctuality.lateness()
        if not late:
            return False
        self._counts["late_rounds"] += 1
        log.warning("membership came %.1f s late: nobody is suspected for that time", late)
        self._detector.postpone(late)
        if late >= self._timing.burial and self._roster is not None:
            # those who buried us have forgotten it by now, so nobody will tell us
            self._roster.was_dead = True
            self._roster.refute()
        return True

    def _sample(self, members: Sequence[Member], roster: Roster) -> list[Member]:
        own = roster.own.node_id
        sound = [m for m in members if m.node_id != own and not self._detector.is_doubtful(m)]
        return self._random.sample(sound, min(FAN_OUT, len(sound)))

    # what comes in and what goes out

    def _exchange(self, roster: Roster, addresses: list[str]) -> None:
        if not addresses:
            return
        blob = encode(roster.own.node_id, roster.view().values())
        self._punctuality.promise(self._timing.exchange_timeout)
        answers = self._network.exchange(addresses, blob, self._timing.exchange_timeout)
        self._forgive()
        for answer in answers:
            if answer is not None:
                self._learn(roster, answer)

    def _learn(self, roster: Roster, blob: bytes) -> None:
        report = self._decode(blob)
        if report is not None:
            self._believe(roster, report)

    def _believe(self, roster: Roster, report: Report) -> None:
        now = self._clock.monotonic()
        for record in self._credible(report):
            roster.take(record, now=now, is_proven=lambda member: self._detector.is_proven(member, now))

    def _decode(self, blob: bytes) -> Report | None:
        try:
            return decode(blob)
        except (ViewError, VersionError) as error:
            if self._counts["malformed_views"] == 0:  # a broken peer sends many; the counter tells how many
                log.warning("dropped %s", error)
            self._counts["malformed_views"] += 1
            return None

    def _serve(self, roster: Roster) -> None:
        view = roster.view()
        if view is not self._served:
            self._served = view
            self._network.set_view(encode(roster.own.node_id, view.values()), view.digest)

    def _commit(self, roster: Roster) -> None:
        """Tell the listeners what changed, then show it: to ``view()`` and to peers.

        In this order, because whoever sees a view acts on it: a node that is a member in ours must count in our
        part of the directory by then.
        """
        if roster.expelled is not None:
            self._stopping.set()
            self._network.withdraw()
            log.error("this node is expelled: %s", roster.expelled)
            self._listeners.on_expelled(roster.expelled)
            return
        old, new = self._view, roster.view()
        if old.digest != new.digest:
            self._has_news = True
            self._account(old, new)
            self._listeners.on_change(old, new)
        self._view = new
        self._serve(roster)
        if roster.was_dead:
            roster.was_dead = False
            log.warning(
                "peers had taken this node for dead; it is back as incarnation %d", roster.own.incarnation
            )
            self._listeners.on_resurrected()

    def _account(self, old: View, new: View) -> None:
        for member in new.values():
            before = old.get(member.node_id)
            if before is not None and (before.boot_epoch, before.state) == (member.boot_epoch, member.state):
                continue
            log.info("node %s at %s is %s", member.node_id, member.address, member.state.name.lower())
            if member.state is State.SUSPECT:
                self._counts["suspicions"] += 1
            elif member.state is State.DEAD:
                self._counts["deaths"] += 1


def _key_and_boot(member: Member) -> tuple[int, int]:
    return (member.key, member.boot_epoch)


def _new_random() -> Random:
    seed = randbits(64)
    log.info("membership draws its random numbers from seed %d", seed)
    return Random(seed)  # noqa: S311 - jitter and sampling, nothing secret
