"""Indirect probes: before a suspect is given up, others are asked whether they reach it.

A node whose probe was not answered asks a few sound peers: has this boot answered you since I sent my probe? A
witness that has such an answer says so; one that has none yet keeps the question for its next rounds, in which
it probes that member whether it is its turn or not. Silence says nothing. So one broken path, or one node whose
own way out is broken, takes nobody off anybody's ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.view import MAX_DOUBTS, Doubt, Member, Proof

_PATIENCE_S = 2.0
"""How long a question is kept: the doubter has asked again by then. Longer where all are late, as answers are."""
_MAX_QUESTIONS = 4096


@dataclass(frozen=True, slots=True)
class _Question:
    since: float
    token: int
    until: float


def doubts(members: Iterable[Member], asked_at: float, now: float) -> list[Doubt]:
    """Return the questions about members whose probe of ``asked_at`` went unanswered; the first 64."""
    ago_ms = round((now - asked_at) * 1000)
    token = round(asked_at * 1000)
    return [Doubt(m.node_id, m.boot_epoch, ago_ms, token) for m in members][:MAX_DOUBTS]


def asked_at(proof: Proof) -> float:
    """Return when the probe was sent that an answered question was about."""
    return proof.token / 1000


class Witness:
    """The questions put to this node that it could not answer yet. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._questions: dict[tuple[str, str, int], _Question] = {}

    def ask(self, doubter: str, doubts: Iterable[Doubt], now: float, *, stretch: int = 1) -> None:
        """Take in what another node doubts."""
        for doubt in doubts:
            if len(self._questions) < _MAX_QUESTIONS:
                # that the message took a while makes this later than the probe: stricter, never laxer
                since = now - max(0, doubt.ago_ms) / 1000
                key = (doubter, doubt.node_id, doubt.boot_epoch)
                self._questions[key] = _Question(since, doubt.token, now + _PATIENCE_S * stretch)

    def asked_about(self) -> set[str]:
        """Return the ids of the members to be probed for others."""
        return {node_id for _, node_id, _ in self._questions}

    def answers(self, detector: FailureDetector, now: float) -> dict[str, list[Proof]]:
        """Return, by the doubter's id, what this node can say by now; each is said once."""
        out: dict[str, list[Proof]] = {}
        for (doubter, node_id, boot), question in list(self._questions.items()):
            if detector.has_answered_since((node_id, boot), question.since):
                out.setdefault(doubter, []).append(Proof(node_id, boot, question.token))
            elif now < question.until:
                continue
            del self._questions[doubter, node_id, boot]
        return {doubter: proofs[:MAX_DOUBTS] for doubter, proofs in out.items()}
