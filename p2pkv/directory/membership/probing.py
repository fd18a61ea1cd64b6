"""What the engines without a registry share: one thread that probes, judges, and tells the peers (:mod:`.telling`).

A round probes many members in parallel. Whoever doesn't answer is asked for at others before it is given up
(:mod:`.witnesses`), and one whose answer comes late is given up later (:mod:`.health`). Subclasses say whom to probe
and whose word counts.

:meth:`ProbingMembership.step` is one turn of the thread's loop. Tests drive it directly, on a simulated
network.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from p2pkv.directory.membership.base import Identity, Listeners, Network, ProbeReply
from p2pkv.directory.membership.detector import boot_of
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.rotation import Rotation
from p2pkv.directory.membership.telling import TellingMembership, key_and_boot
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import DEFAULT_CLUSTER, Member, State, View

log = logging.getLogger(__name__)

_FAILURES_TO_WITHDRAW = 10
"""Turns that fail in a row, five seconds or so, after which peers go on without this node until one succeeds."""

_WITNESSED = 3
"""Members that a witness probes at once between its own turns. Where many are asked about, all may be late, and asking
more would make them later."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Whom to probe in one round."""

    members: Sequence[Member]
    """Their silence counts against them."""
    addresses: Sequence[str] = ()
    """Probed only to see who is there."""


class ProbingMembership(TellingMembership):
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
        super().__init__(network, identity, listeners=listeners, clock=clock, timing=timing, random=random)
        cluster = identity.cluster
        # A process has as many clusters as its node has tenants, and one more, all with the same node ids.
        self._where = "" if cluster == DEFAULT_CLUSTER else f" in cluster {cluster!r}"
        self._rotation = Rotation(self._random)
        self._witnessed = Rotation(self._random, _WITNESSED)
        self._next_round = 0.0
        self._last_round = -math.inf
        self._reboot_not_before = -math.inf
        self._rival_asked: tuple[str, int] | None = None  # where, and in which boot
        self._rival_asked_since = -math.inf
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._settled = threading.Event()
        self._closing = threading.Lock()  # held by whoever closes first; guards nothing else

    # what subclasses decide

    @abstractmethod
    def _wait_outside(self, roster: Roster) -> float:
        """Do what an expelled node does; return how many seconds the next step may wait."""

    @abstractmethod
    def _targets(self, now: float) -> Targets:
        """Return whom to probe now."""

    def _let_go(self) -> None:
        """Give up every address but the one listened on."""
        self._network.listen_no_more()

    def _probed(self, replies: Mapping[str, ProbeReply | None]) -> None:
        """Look at the replies of a round, by address; without the silent if it came late. Need not be overridden."""

    # the interface

    def view(self) -> View:
        return self._view

    def drain(self) -> None:
        self._draining.set()
        self._network.wake()

    def settle(self) -> None:
        self._settled.set()
        self._network.wake()

    @property
    def boot_epoch(self) -> int:
        return self._roster.own.boot_epoch if self._roster is not None else 0

    def counters(self) -> dict[str, int]:
        all_counts = {**self._counts, **self._messages.counts}
        counts = {f"p2pkv_membership_{name}_total": count for name, count in all_counts.items()}
        counts["p2pkv_membership_stretch"] = self._health.stretch
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
        self._hear_late(roster)
        self._meet_rival(roster)
        if self._draining.is_set():
            roster.drain()
        if self._settled.is_set():
            self._settled.clear()
            roster.settle()
        if self._clock.monotonic() >= self._next_turn():
            self._round(roster)
            self._hear_late(roster)
        self._judge(roster)
        self._commit(roster)
        if not self._view:  # expelled
            return 0.0
        if not self._stopping.is_set():
            self._spread(roster)
        if not self._stopping.is_set():
            self._listeners.on_confirmed()
        due = 0.0 if self._news.is_untold else min(self._next_turn(), self._detector.next_deadline())
        # however seldom it asks: who listens is told twice a second that the view is confirmed
        wait = min(max(0.0, due - self._clock.monotonic()), self._timing.probe_interval)
        self._punctuality.promise(wait)
        return wait

    def _round(self, roster: Roster) -> None:
        started = self._clock.monotonic()
        is_turn = started >= self._next_round
        targets = self._due_targets(started, is_turn=is_turn)
        addresses = list(dict.fromkeys([*(member.address for member in targets.members), *targets.addresses]))
        if not addresses:
            self._judge_health(0, 0)
            return
        self._punctuality.promise(self._timing.probe_timeout)
        answers = self._network.probe(
            addresses, self._timing.probe_timeout, meanwhile=lambda: self._listen(roster)
        )
        replies = dict(zip(addresses, answers, strict=True))
        was_late = self._forgive()
        self._hear_late(roster)
        counts = is_turn and not was_late
        silent = self._take_answers(roster, targets, replies, started, counts=counts)
        if counts:
            self._judge_health(len(targets.members), len(silent))
        self._ask_witnesses(roster, silent, started)
        if is_turn:
            self._see_who_is_there(roster, targets, replies, was_late=was_late)

    def _listen(self, roster: Roster) -> None:
        """Take in what peers hand over while this node waits for one that is silent, and show it.

        A node that starts waits until its peers believe it; and where one has died, most of the time is such a wait.
        """
        blobs = self._network.received(0.0)
        for blob in blobs:
            self._learn(roster, blob)
        if blobs and not self._stopping.is_set():
            self._commit(roster)

    def _judge_health(self, n_asked: int, n_silent: int) -> None:
        self._health.judged(self._clock.monotonic(), n_asked=n_asked, n_silent=n_silent)
        self._detector.stretch = self._health.stretch

    def _see_who_is_there(
        self, roster: Roster, targets: Targets, replies: dict[str, ProbeReply | None], *, was_late: bool
    ) -> None:
        """Act on what was answered, whether in time or since the last turn, by whomever."""
        late, self._late = self._late, {}
        replies.update({a: reply for a, reply in late.items() if replies.get(a) is None})
        if was_late:
            replies = {address: reply for address, reply in replies.items() if reply is not None}
        self._probed(replies)
        present = {member.address for member in roster.view().present()}
        strangers = [*targets.addresses, *(address for address in late if address not in present)]
        self._compare(roster, strangers, replies)

    def _due_targets(self, started: float, *, is_turn: bool) -> Targets:
        """Return whom to probe: all whose turn it is, or, before that is so again, those that others ask about."""
        self._last_round = started
        if not is_turn:
            return Targets(self._witnessed.next(self._asked_about()))
        period = self._timing.probe_interval * self._health.stretch
        self._next_round = started + period * self._random.uniform(0.9, 1.0)
        return self._targets(started)

    def _asked_about(self) -> list[Member]:
        """Return the others for whom this node is a witness."""
        asked_about = self._witness.asked_about()
        own = self._identity.node_id
        return [m for m in self._view.present() if m.node_id in asked_about and m.node_id != own]

    def _next_turn(self) -> float:
        """Return when the next round is due: a witness does not let others wait, however seldom it asks itself."""
        if not self._asked_about():
            return self._next_round
        return min(self._next_round, self._last_round + self._timing.probe_interval)

    def _take_answers(
        self,
        roster: Roster,
        targets: Targets,
        replies: Mapping[str, ProbeReply | None],
        started: float,
        *,
        counts: bool,
    ) -> list[Member]:
        """Trust the members that answered; doubt the others, if their silence ``counts``, and return them."""
        now = self._clock.monotonic()
        silent = []
        for member in targets.members:
            reply = replies[member.address]
            if reply is not None and (reply.node_key, reply.boot_epoch) == key_and_boot(member):
                self._detector.answered(member, now, asked_at=started)
                roster.trust(member, now)
            elif counts and not self._detector.has_answered_since(boot_of(member), started):
                silent.append(member)
                if self._detector.missed(member, asked_at=started):
                    roster.suspect(member, now)
        return silent

    def _meet_rival(self, roster: Roster) -> None:
        """Find out who goes on under this node's id, if a record of a higher boot of it has come up."""
        rival, own, now = roster.rival, roster.own, self._clock.monotonic()
        if rival is None or now < self._reboot_not_before:
            return
        reply = None
        if rival.boot_epoch >= own.boot_epoch and rival.address != own.address:
            reply = self._ask_rival(rival, now)
            if reply is None and now < self._rival_asked_since + self._timing.duplicate_patience:
                return
        roster.rival, self._rival_asked = None, None
        self._namesakes.clear()
        if rival.boot_epoch < own.boot_epoch:
            return
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

    def _ask_rival(self, rival: Member, now: float) -> ProbeReply | None:
        """Return what it answers, now or late to an earlier question; None if nothing yet."""
        address = rival.address
        if self._rival_asked != (address, rival.boot_epoch):
            self._rival_asked, self._rival_asked_since = (address, rival.boot_epoch), now
        if (late := self._namesakes.get(address)) is not None:
            return late
        self._punctuality.promise(self._timing.duplicate_timeout)
        [reply] = self._network.probe([address], self._timing.duplicate_timeout)
        self._forgive()
        return reply

    def _judge(self, roster: Roster) -> None:
        now = self._clock.monotonic()
        self._detector.observe(roster.view(), now)
        for node_id in self._detector.overdue(now):
            roster.bury(node_id, now)
        roster.forget(now)
        self._detector.observe(roster.view(), now)

    # what becomes known

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
            self._health.erred(self._clock.monotonic())
            log.warning(
                "peers had taken this node for dead; it is back as incarnation %d", roster.own.incarnation
            )
            self._listeners.on_resurrected()

    def _account(self, old: View, new: View) -> None:
        n_back = sum(
            member.is_present and before is not None and before.state is State.DEAD
            for member in new.values()
            if (before := old.get(member.node_id)) is not None and before.boot_epoch == member.boot_epoch
        )
        if n_back >= 2 and 4 * n_back >= len(new.present()):
            self._health.erred(self._clock.monotonic())
        for member in new.values():
            before = old.get(member.node_id)
            if before is not None and (before.boot_epoch, before.state) == (member.boot_epoch, member.state):
                continue
            state = member.state.name.lower()
            log.info("node %s at %s is %s%s", member.node_id, member.address, state, self._where)
            if member.state is State.SUSPECT:
                self._counts["suspicions"] += 1
            elif member.state is State.DEAD and before is not None:  # else it died while this node was out
                self._counts["deaths"] += 1


def _differ(old: View, new: View) -> bool:
    """Whether anybody came, went, or changed state, or has pages of other boots now, also while it is away."""
    return (
        old.digest != new.digest
        or any(
            member.is_present and old[node_id].state is not member.state for node_id, member in new.items()
        )
        or _lives(old) != _lives(new)
    )


def _lives(view: View) -> dict[str, tuple[int, int]]:
    """Return which boots the pages are of that members have, or may come back with; digests don't tell."""
    return {
        node_id: (member.boot_epoch, member.kept_since)
        for node_id, member in view.items()
        if member.kept_since and (member.is_present or member.may_come_back)
    }
