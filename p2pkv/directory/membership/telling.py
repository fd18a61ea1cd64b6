"""What a node and its peers tell each other: news, whole views, doubts, testimony, and answers that come late.

A change is told to a few peers at once, so that news doesn't wait for the next round. A peer whose digest differs from
ours is told what is new, and exchanged views with if that did not help; it is never refused.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from secrets import randbits

from p2pkv.directory.membership.base import Identity, Listeners, Membership, Network, ProbeReply
from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.membership.health import Health
from p2pkv.directory.membership.messages import Messages
from p2pkv.directory.membership.news import News
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.rotation import Rotation
from p2pkv.directory.membership.timing import Clock, Punctuality, SystemClock, Timing
from p2pkv.directory.membership.witnesses import Witness, asked_at, doubts
from p2pkv.directory.view import Member, Report, View
from p2pkv.limited_log import LimitedLog

log = logging.getLogger(__name__)

FAN_OUT = 3
"""Peers that one node tells of a change, exchanges views with in a round, and asks for one that is silent."""
_HAND_OVER_S = 1.0
"""How often at most a member is told what is said about it."""


class TellingMembership(Membership):
    """What the loop of :mod:`.probing` knows and says. All of it belongs to the engine's thread."""

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
        self._health = Health(self._timing)
        self._late: dict[str, ProbeReply] = {}
        self._namesakes: dict[str, ProbeReply] = {}
        self._overslept = False
        self._punctuality = Punctuality(self._clock, self._timing.lateness_tolerance)
        self._lateness_log = LimitedLog(log, clock=self._clock.monotonic)
        self._roster: Roster | None = None
        self._view = View()
        self._served: View | None = None
        self._news = News()
        self._messages = Messages(identity.node_id, identity.cluster, self._random)
        self._witness = Witness()
        self._witnesses = Rotation(self._random, FAN_OUT)
        self._handed_over: dict[str, float] = {}
        self._counts = dict.fromkeys(("late_rounds", "suspicions", "deaths", "reboots", "failures"), 0)

    @abstractmethod
    def _credible(self, report: Report) -> Iterable[Member]:
        """Return the records of a peer's view that count."""

    # what goes out

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

    def _ask_witnesses(self, roster: Roster, silent: Sequence[Member], started: float) -> None:
        """Ask others for those who did not answer, and answer others for whom we were asked."""
        now = self._clock.monotonic()
        view = roster.view()
        messages = []
        if self._health.stretch > 1:  # there is more time, and whoever is merely late has answered by then
            silent = [member for member in silent if self._detector.has_missed_enough(member)]
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

    def _compare(
        self, roster: Roster, strangers: Sequence[str], replies: Mapping[str, ProbeReply | None]
    ) -> None:
        """Bring closer together those who believe otherwise than this node."""
        now, digest = self._clock.monotonic(), self._view.digest
        digests = {address: reply.digest for address, reply in replies.items() if reply is not None}
        # a member at a join address is none: all ask it, and it may hear of a change a moment after them
        unknown = [a for a in dict.fromkeys(strangers) if not _is_by_member(roster.view(), replies.get(a))]
        unlike = [address for address in unknown if digests.pop(address, digest) != digest]
        to_tell, to_exchange = self._news.sort_out(digests, digest, now)
        recent = self._news.recent(now) if to_tell else []
        if recent:
            blob = self._messages.news(recent)
            self._tell([(a, blob) for a in self._random.sample(to_tell, min(FAN_OUT, len(to_tell)))])
        chosen = [*unlike, *self._random.sample(to_exchange, len(to_exchange))][:FAN_OUT]
        for address in chosen:
            self._news.exchanged(address)
        self._exchange(roster, chosen)

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

    def _serve(self, roster: Roster) -> None:
        view = roster.view()
        if view is not self._served:
            self._served = view
            self._network.set_view(self._messages.view(view.values()), view.digest)

    def _sample(self, members: Sequence[Member], roster: Roster) -> list[Member]:
        sound = self._sound(members, roster)
        return self._random.sample(sound, min(FAN_OUT, len(sound)))

    def _sound(self, members: Sequence[Member], roster: Roster) -> list[Member]:
        """Return the others that are not in doubt; all others where too many are, since they may be merely late."""
        others = [member for member in members if member.node_id != roster.own.node_id]
        sound = [member for member in others if not self._detector.is_doubtful(member)]
        return sound if len(sound) >= min(FAN_OUT, len(others)) or self._health.stretch == 1 else others

    # what comes in

    def _learn(self, roster: Roster, blob: bytes) -> None:
        report = self._messages.read(blob)
        if report is not None:
            self._believe(roster, report)

    def _believe(self, roster: Roster, report: Report) -> None:
        now = self._clock.monotonic()
        self._witness.ask(report.sender, report.doubts, now, stretch=self._health.stretch)
        for proof in report.proofs:
            self._detector.vouched((proof.node_id, proof.boot_epoch), min(asked_at(proof), now))
        for record in self._credible(report):
            roster.take(record, now=now, is_proven=lambda member: self._detector.is_proven(member, now))

    def _hear_late(self, roster: Roster) -> None:
        """Take in the answers that came after their time; those to probes are kept for the next round, too.

        Those that lay there while this node slept say nothing of how late their senders are.
        """
        now = self._clock.monotonic()
        members = {member.address: member for member in roster.view().present()}
        for answer in self._network.late(self._health.stretch):
            if answer.view is not None:
                self._learn(roster, answer.view)
            if answer.reply is None:
                continue
            self._late[answer.address] = answer.reply
            # by another node under this one's id: the one that has come up, if it still lives
            if roster.rival is not None and answer.reply.node_key == roster.own.key:
                self._namesakes[answer.address] = answer.reply
            member = members.get(answer.address)
            if member is None or (answer.reply.node_key, answer.reply.boot_epoch) != key_and_boot(member):
                continue
            if not self._overslept:
                self._health.heard_late(member.node_id, now - answer.asked_at)
            if self._detector.answered_late(member, answer.asked_at):
                roster.trust(member, now)
        self._overslept = False

    def _forgive(self) -> bool:
        """Take out of every timer what this node slept through; true if it slept at all."""
        late = self._punctuality.lateness()
        if self._punctuality.busy_s > self._timing.lateness_tolerance:
            self._detector.postpone(self._punctuality.busy_s)  # nobody was asked meanwhile
        if not late:
            return False
        self._overslept = True
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


def key_and_boot(member: Member) -> tuple[int, int]:
    """Return what a member answers probes with."""
    return (member.key, member.boot_epoch)


def _is_by_member(view: View, reply: ProbeReply | None) -> bool:
    """Whether a member has answered, in the boot in which it is one."""
    member = None if reply is None else view.by_key(reply.node_key)
    return (
        member is not None
        and member.is_present
        and reply is not None
        and reply.boot_epoch == member.boot_epoch
    )


def _new_random() -> Random:
    seed = randbits(64)
    log.debug("membership draws its random numbers from seed %d", seed)
    return Random(seed)  # noqa: S311 - jitter and sampling, nothing secret
