"""Asking every member about a page, and saying what the answers come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind
from p2pkv.directory.view import Member
from p2pkv.errors import ControlError, UsageError
from p2pkv.explain.explanation import Explanation, explain
from p2pkv.explain.messages import MAX_KEY_BYTES, Answer, Call, Question, decode, encode
from p2pkv.explain.witness import Witness
from p2pkv.page import KEY_BYTES

_MOST_EXPLAINED = 8
"""Missed pages of a request that are asked about."""


def question_about(
    key: str | bytes | None, page_id: bytes | None = None, namespace: str | None = None
) -> Question:
    """Make the question about a page. Raises :class:`~p2pkv.errors.UsageError` for what can't be one."""
    if (key is None) == (page_id is None):
        raise UsageError("a page is named by the key it was published as, or by its id")
    if page_id is not None and len(page_id) != KEY_BYTES:
        raise UsageError(f"the id of a page has {KEY_BYTES} bytes, {2 * KEY_BYTES} hexadecimal digits")
    if not isinstance(key, (str, bytes, type(None))):
        raise UsageError(f"a key is str or bytes, not {type(key).__name__}")
    text = key.encode() if isinstance(key, str) else key
    if text is not None and len(text) > MAX_KEY_BYTES:
        raise UsageError(f"a key of {len(text)} bytes; explain takes up to {MAX_KEY_BYTES}")
    return Question(key=text, id=page_id, namespace=namespace)


def ask_members(
    client: ControlClient, members: Sequence[Member], question: Question, timeout: float
) -> tuple[list[Answer], list[str]]:
    """Return what was answered within ``timeout`` seconds, and the ids of those who did not."""
    body = encode(question)
    answers: list[Answer] = []
    silent = {member.node_id for member in members}
    requests = [Request(member.address, Kind.EXPLAIN, body, boot=member.boot_epoch) for member in members]
    with client.send(requests) as calls:
        for index, reply in calls.replies(timeout):
            if not reply.ok:  # too old for the question, or not in that boot any more
                continue
            try:
                answers.append(decode(reply.body, Answer))
            except ControlError as error:
                client.log.warning("explain", "node %s: %s", members[index].node_id, error)
                continue
            silent.discard(members[index].node_id)
    answers.sort(key=lambda answer: answer.node_id)
    return answers, sorted(silent)


def explanation_of(
    question: Question, answers: Sequence[Answer], silent: Sequence[str], *, everywhere: bool = False
) -> Explanation:
    """Say what the answers to ``question`` come to; there is one at least."""
    named = question.key if question.key is not None else (question.id or b"").hex().encode()
    return explain(named.decode(errors="backslashreplace"), answers, silent, everywhere=everywhere)


class CallOf(NamedTuple):
    """A call for a request, at a node."""

    node_id: str
    call: Call


@dataclass(frozen=True, slots=True)
class RequestCalls:
    """What became of the pages of an engine's request, as far as nodes remember its calls."""

    request: str
    calls: tuple[CallOf, ...]
    """In the order in which they ended, by the clocks of their nodes."""
    missed: Mapping[bytes, Explanation]
    """Why pages that were missed are not there, of some of them."""
    answered: tuple[str, ...]
    silent: tuple[str, ...]


def explain_request(
    client: ControlClient, members: Sequence[Member], request: str, timeout: float
) -> RequestCalls:
    """Ask all members what their calls found for a request, and about the first pages that these missed.

    Blocks for ``timeout`` seconds at most, and as long again if pages were missed.
    """
    answers, silent = ask_members(client, members, Question(request=request), timeout)
    calls = sorted(
        (CallOf(answer.node_id, call) for answer in answers for call in answer.calls),
        key=lambda one: one.call.at,
    )
    ids = dict.fromkeys(page_id for one in calls for page_id in one.call.missed)
    deadline = time.monotonic() + timeout
    missed = {}
    for page_id in islice(ids, _MOST_EXPLAINED):
        question = question_about(None, page_id)
        told, unheard = ask_members(client, members, question, max(0.0, deadline - time.monotonic()))
        if told:
            missed[page_id] = explanation_of(question, told, unheard)
    return RequestCalls(
        request, tuple(calls), missed, tuple(answer.node_id for answer in answers), tuple(silent)
    )


class Explainer:
    """Asks for a node, which knows itself what it has. Thread-safe."""

    def __init__(
        self, witness: Witness, client: ControlClient, others: Callable[[], Iterable[Member]]
    ) -> None:
        self._witness = witness
        self._client = client
        self._others = others

    def explain(self, question: Question, timeout: float) -> Explanation:
        """Ask all members, for ``timeout`` seconds at most. Raises :class:`~p2pkv.errors.ClosedError`."""
        own = self._witness.tell(question)
        answers, silent = ask_members(self._client, list(self._others()), question, timeout)
        return explanation_of(question, [own, *answers], silent)

    def ask(self, question: Question, timeout: float) -> list[Answer]:
        """Return what the other members answer."""
        return ask_members(self._client, list(self._others()), question, timeout)[0]
