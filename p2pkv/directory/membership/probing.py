"""What the engines without a registry share: one thread that probes, judges, and tells the peers.

A round probes many members in parallel. A change is told to a few peers at once, so that news doesn't wait for the
next round. A peer whose digest differs from ours is told what is new, and exchanged views with if that did not help;
it is never refused. Whoever doesn't answer is asked for at others before it is given up (:mod:`.witnesses`).
Subclasses say whom to probe and whose word counts.

:meth:`ProbingMembership.step` is one turn of the thread's loop. Tests drive it directly, on a simulated
network.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from secrets import randbits

from p2pkv.directory.membership.base import Identity, Listeners, Membership, Network, ProbeReply
from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.membership.messages import Messages
from p2pkv.directory.membership.news import News
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.rotation import Rotation
from p2pkv.directory.membership.timing import Clock, Punctuality, SystemClock, Timing
from p2pkv.directory.membership.witnesses import Witness, asked_at, doubts
from p2pkv.directory.view import Member, Report, State, View
from p2pkv.limited_log import LimitedLog

log = logging.getLogger(__name__)

FAN_OUT = 3
"""Peers that one node tells of a change, exchanges views with in a round, and asks for one that is silent."""
_FAILURES_TO_WITHDRAW = 10
"""Turns that fail in a row, five seconds or so, after which peers go on without this node until one succeeds."""
_HAND_OVER_S = 1.0
"""How often at most a member is told what is said about it."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Whom to probe in one round."""

    members: Sequence[Member]
    """Their silence counts against them."""
    addresses: Sequence[str] = ()
    """Probed only to see who is there."""


class ProbingMembership(Membership):
    """The loop. Everything but ``_stopping`` belongs to the engine's thread once ``start`` has returned.

    The thread ``p2pkv-membership`` is started by ``start`` and joined by ``close`` (:mod:`.entering`).
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
        self._lateness_log = LimitedLog(log, clock=self._clock.monotonic)
        self._roster: Roster | None = None
        self._view = View()
        self._served: View | None = None
        self._next_round = 0.0
        self._news = News()
        self._messages = Messages(identity.node_id, identity.cluster, self._random)
        self._witness = Witness()
        self._witnesses = Rotation(self._random, FAN_OUT)
        self._handed_over: dict[str, float] = {}
        self._reboot_not_before = -math.inf
        self._counts = dict.fromkeys(("late_rounds", "suspicions", "deaths", "reboots", "failures"), 0)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._closing = threading.Lock()  # held by whoever closes first; guards nothing else

    # what subclasses decide

    @abstractmethod
    def _wait_outside(self, roster: Roster) -> float:
        """Do what an expelled node does; return how many seconds the next step may wait."""

    @abstractmethod
    def _targets(self, now: float) -> Targets:
        """Return whom to probe now."""

    @abstractmethod
    def _credible(self, report: Report) -> Iterable[Member]:
        """Return the records of a peer's view that count."""

    def _let_go(self) -> None:
        """Give up every address but the one listened on."""
        self._network.listen_no_more()

    def _probed(self, replies: Mapping[str, ProbeReply | None]) -> None:
        """Look at the replies of a punctual round, by address. Need not be overridden."""

    # the interface

    def view(self) -> View:
        return self._view

    def drain(self) -> None:
        self._draining.set()
        self._network.wake()

    @property
    def boot_epoch(self) -> int:
        return self._roster.own.boot_epoch if self._roster is not None else 0

    def counters(self) -> dict[str, int]:
        all_counts = {**self._counts, **self._messages.counts}
        counts = {f"p2pkv_membership_{name}_total": count for name, count in all_counts.items()}
        counts["p2pkv_expelled"] = int(self._roster is not None and self._roster.expelled is not None)
        counts["p2pkv_membership_refused_records_total"] = self._roster.n_refused if self._roster else 0
        return counts

    # the loop

    def _run(self) -> None:
        wait, failures = 0.0, 0
        while not self._stopping.is_set():
            try:
                wait = self.step(self._network.received(wait))
                if failures >= _FAILURES_TO_WITHDRAW:
                    self._come_back()
                failures = 0
            except Exception:
                failures += 1
                self._counts["failures"] += 1
                if failures in (1, _FAILURES_TO_WITHDRAW):
                    log.exception("membership failed, %d times in a row; it goes on trying", failures)
                if failures == _FAILURES_TO_WITHDRAW:
                    self._network.withdraw()  # peers must not count on a node that learns nothing any more
                self._stopping.wait(self._timing.probe_interval)
                wait = 0.0

    def _come_back(self) -> None:
        roster = self._roster
        assert roster is not None
        if roster.expelled is None:
            log.warning("membership works again")
            self._network.announce(*key_and_boot(roster.own))
            roster.was_dead = True
            roster.refute()

    def step(self, blobs: Sequence[bytes]) -> float:
        """Take in what peers handed over and do what is due; return how many seconds the next may wait."""
        roster = self._roster
        assert roster is not None, "enter() comes first"
        if self._stopping.is_set():
            return self._timing.probe_interval
        if roster.expelled is not None:
            return self._wait_outside(roster)
        self._forgive()
        for blob in blobs:
            self._learn(roster, blob)
        self._meet_rival(roster)
        if self._draining.is_set():
            roster.drain()
        if self._clock.monotonic() >= self._next_round:
            self._round(roster)
        self._judge(roster)
        self._commit(roster)
        if not self._view:  # expelled
            return 0.0
        if not self._stopping.is_set():
            self._spread(roster)
        if not self._stopping.is_set():
            self._listeners.on_confirmed()
        due = 0.0 if self._news.is_untold else min(self._next_round, self._detector.next_deadline())
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
        silent = []
        for member in targets.members:
            reply = replies[member.address]
            if reply is not None and (reply.node_key, reply.boot_epoch) == key_and_boot(member):
                self._detector.answered(member, now, asked_at=started)
                roster.trust(member, now)
            elif not is_late:
                silent.append(member)
                if self._detector.missed(member):
                    roster.suspect(member, now)
        if not is_late:
            self._probed(replies)
        self._ask_witnesses(roster, silent, started)
        self._compare(roster, targets, replies)

    def _ask_witnesses(self, roster: Roster, silent: Sequence[Member], started: float) -> None:
        """Ask others for those who did not answer, and answer others for whom we were asked."""
        now = self._clock.monotonic()
        view = roster.view()
        messages = []
        if silent:
            asked = doubts(silent, started, now)
            blob = self._messages.news(doubts=asked)
            sound = self._sound(view.alive(), roster)
            # others each time: perhaps only one of all has a way to the silent
            messages = [(peer.address, blob) for peer in self._witnesses.next(sound)]
        self._tell([*messages, *self._testimony(roster)])

    def _testimony(self, roster: Roster) -> list[tuple[str, bytes]]:
        """Return what this node can say by now for those who asked, as messages."""
        view = roster.view()
        answers = self._witness.answers(self._detector, self._clock.monotonic())
        return [
            (view[doubter].address, self._messages.news(proofs=proofs))
            for doubter, proofs in answers.items()
            if doubter in view
        ]

    def _compare(self, roster: Roster, targets: Targets, replies: Mapping[str, ProbeReply | None]) -> None:
        """Bring closer together those who believe otherwise than this node."""
        digest = self._view.digest
        differs = {a: reply.digest != digest for a, reply in replies.items() if reply is not None}
        strangers = [a for a in targets.addresses if differs.pop(a, False)]
        to_tell, to_exchange = self._news.sort_out(differs)
        recent = self._news.recent(self._clock.monotonic()) if to_tell else []
        if recent:
            blob = self._messages.news(recent)
            self._tell([(a, blob) for a in self._random.sample(to_tell, min(FAN_OUT, len(to_tell)))])
        chosen = [*strangers, *self._random.sample(to_exchange, len(to_exchange))][:FAN_OUT]
        for address in chosen:
            self._news.exchanged(address)
        self._exchange(roster, chosen)

    def _meet_rival(self, roster: Roster) -> None:
        """Find out who goes on under this node's id, if a record of a higher boot of it has come up."""
        rival, own, now = roster.rival, roster.own, self._clock.monotonic()
        if rival is None or now < self._reboot_not_before:
            return
        roster.rival = None
        if rival.boot_epoch < own.boot_epoch:
            return
        reply = None
        if rival.address != own.address:
            self._punctuality.promise(self._timing.duplicate_timeout)
            reply = self._network.probe([rival.address], self._timing.duplicate_timeout)[0]
            self._forgive()
        # an answer with our own boot is our own: the rival's address is one of ours by now
        if reply is not None and reply.node_key == own.key and reply.boot_epoch >= rival.boot_epoch:
            roster.expelled = (
                f"node id {own.node_id!r} was started again at {rival.address} with boot epoch "
                f"{rival.boot_epoch}, above ours ({own.boot_epoch} at {own.address}); "
                "give each process its own node_id"
            )
            roster.successor = rival
            return
        self._reboot_not_before = now + self._timing.reboot_interval
        roster.reboot(rival.boot_epoch + 1)
        log.warning(
            "peers know an earlier boot of node %s whose epoch, %d, is above this one's: a clock was set back; "
            "going on under %d",
            own.node_id,
            rival.boot_epoch,
            rival.boot_epoch + 1,
        )
        self._counts["reboots"] += 1
        self._listeners.on_reboot(roster.own.boot_epoch)
        self._network.announce(*key_and_boot(roster.own))

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
        if self._punctuality.busy_s > self._timing.lateness_tolerance:
            self._detector.postpone(self._punctuality.busy_s)  # nobody was asked meanwhile
        if not late:
            return False
        self._counts["late_rounds"] += 1
        was_buried = late >= self._timing.burial
        self._lateness_log.warning(
            was_buried, "membership came %.1f s late: nobody is suspected for that time", late
        )
        self._detector.postpone(late)
        if was_buried and self._roster is not None:
            # those who buried us have forgotten it by now, so nobody will tell us
            self._roster.was_dead = True
            self._roster.refute()
        return True

    def _sample(self, members: Sequence[Member], roster: Roster) -> list[Member]:
        sound = self._sound(members, roster)
        return self._random.sample(sound, min(FAN_OUT, len(sound)))

    def _sound(self, members: Sequence[Member], roster: Roster) -> list[Member]:
        own = roster.own.node_id
        return [m for m in members if m.node_id != own and not self._detector.is_doubtful(m)]

    # what comes in and what goes out

    def _spread(self, roster: Roster) -> None:
        """Tell a few peers what is new, and members what is said about them."""
        now = self._clock.monotonic()
        messages = []
        if self._news.is_untold:
            blob = self._messages.news(self._news.take())
            messages = [(peer.address, blob) for peer in self._sample(roster.view().alive(), roster)]
        self._handed_over = {who: at for who, at in self._handed_over.items() if at + _HAND_OVER_S > now}
        for rumour in roster.rumours():
            member = roster.view().get(rumour.node_id)
            if member is not None and member.node_id not in self._handed_over:
                self._handed_over[member.node_id] = now
                messages.append((member.address, self._messages.news([rumour])))
        self._tell([*messages, *self._testimony(roster)])

    def _tell(self, messages: Sequence[tuple[str, bytes]]) -> None:
        if messages:
            self._punctuality.promise(self._timing.exchange_timeout)
            self._network.tell(messages, self._timing.exchange_timeout)
            self._forgive()

    def _exchange(self, roster: Roster, addresses: list[str]) -> None:
        if not addresses:
            return
        blob = self._messages.view(roster.view().values())
        self._punctuality.promise(self._timing.exchange_timeout)
        answers = self._network.exchange(addresses, blob, self._timing.exchange_timeout)
        self._forgive()
        for answer in answers:
            if answer is not None:
                self._learn(roster, answer)

    def _learn(self, roster: Roster, blob: bytes) -> None:
        report = self._messages.read(blob)
        if report is not None:
            self._believe(roster, report)

    def _believe(self, roster: Roster, report: Report) -> None:
        now = self._clock.monotonic()
        self._witness.ask(report.sender, report.doubts, now)
        for proof in report.proofs:
            self._detector.vouched((proof.node_id, proof.boot_epoch), min(asked_at(proof), now))
        for record in self._credible(report):
            roster.take(record, now=now, is_proven=lambda member: self._detector.is_proven(member, now))

    def _serve(self, roster: Roster) -> None:
        view = roster.view()
        if view is not self._served:
            self._served = view
            self._network.set_view(self._messages.view(view.values()), view.digest)

    def _commit(self, roster: Roster) -> None:
        """Tell the listeners what changed, then show it: to ``view()`` and to peers.

        In this order, because whoever sees a view acts on it: a node that is a member in ours must count in our
        part of the directory by then.
        """
        if roster.expelled is not None:
            self._network.withdraw()
            # whoever joins must not knock at a door that nobody opens
            self._let_go()
            log.error("this node is expelled: %s", roster.expelled)
            self._listeners.on_expelled(roster.expelled)
            self._view = View()
            return
        old, new = self._view, roster.view()
        if old is not new and _differ(old, new):
            self._listeners.on_change(old, new)  # if it raises, the next turn tells it again
            self._account(old, new)
        self._news.add(roster.news(), self._clock.monotonic())
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
            elif member.state is State.DEAD and before is not None:  # else it died while this node was out
                self._counts["deaths"] += 1


def _differ(old: View, new: View) -> bool:
    """Whether anybody came, went, or changed state."""
    return old.digest != new.digest or any(
        member.is_present and old[node_id].state is not member.state for node_id, member in new.items()
    )


def key_and_boot(member: Member) -> tuple[int, int]:
    """Return what a member answers probes with."""
    return (member.key, member.boot_epoch)


def _new_random() -> Random:
    seed = randbits(64)
    log.debug("membership draws its random numbers from seed %d", seed)
    return Random(seed)  # noqa: S311 - jitter and sampling, nothing secret
