"""Asking a cluster without joining it: what ``p2pkv status`` and ``p2pkv top`` show comes from here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
import zmq

from p2pkv._native import NamespaceEpochs
from p2pkv.cache.drained import Drained, decode_drained, pack_drain
from p2pkv.cli.busiest import ASKED
from p2pkv.config import Config
from p2pkv.control.counters import decode_counters
from p2pkv.control.host_names import Names
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.control.silence import why_silent
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind, ReplyStatus
from p2pkv.directory.epochs import Bump, EpochKeeper
from p2pkv.directory.given_up import MOST
from p2pkv.directory.registry.look import look
from p2pkv.directory.view import Member, Report, State, decode, encode
from p2pkv.errors import ConfigError, ControlError, UsageError
from p2pkv.explain.asking import RequestCalls, ask_members, explain_request, explanation_of
from p2pkv.explain.explanation import Explanation
from p2pkv.explain.messages import Answer, Question

if TYPE_CHECKING:
    from typing_extensions import Self

_ASK_AGAIN_S = 1.0
_MEET_S = 5.0
"""How long it takes at most to find out who is there, whatever is to be waited for then."""
_LOOK_S = 0.1
"""Between two questions whether a node has drained."""

Join = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A node to ask; may be repeated. Default: the setting 'join'."),
]


def addresses_to_ask(config: Config, timeout: float) -> tuple[str, ...]:
    """Return the addresses that were given, or else those that ``membership``'s store has.

    Raises :class:`~p2pkv.errors.ConfigError` if there is none, and :class:`~p2pkv.errors.RegistryError`.
    """
    if config.join_addresses:
        return config.join_addresses
    if config.store is None:
        raise ConfigError("whom to ask is missing: give --join HOST:PORT, or the setting 'join'")
    sight = look(
        config.store, cluster_keys(config.secret_file, config.accepted_secret_files), config.cluster, timeout
    )
    if not sight.members:
        why = "".join(f"; that of {name!r} is refused: {reason}" for name, reason in sight.refused.items())
        raise ControlError(
            f"{config.store.where} has no record of a node of cluster {config.cluster!r}{why[:500]}"
        )
    return tuple(member.address for member in sight.members)


class Outsider:
    """Holds the secret, but is no member: what it asks teaches nobody anything. Used by one thread."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._names = Names()
        self._client = ControlClient(self._context, keys, self._names)

    def members(self, addresses: Sequence[str], timeout: float) -> tuple[Report, str]:
        """Return the first node's answer, and its address.

        Raises :class:`~p2pkv.errors.ControlError` with the reasons if none answers within ``timeout`` seconds.
        """
        question = encode("p2pkv-outsider", ())  # a view without members
        self._names.wait_for(addresses, timeout)
        requests = [Request(address, Kind.EXCHANGE, question) for address in addresses]
        with self._client.send(requests) as calls:
            for index, reply in calls.replies(timeout):
                if reply.ok:
                    return decode(reply.body), addresses[index]
        reasons = "; ".join(f"{address}: {why_silent(address)}" for address in addresses)
        raise ControlError(f"no node answered within {timeout:g} s ({reasons})")

    def counters(self, members: Sequence[Member], timeout: float) -> Mapping[str, dict[str, float]]:
        """Return, by node id, the counters of the ``members`` that tell them within ``timeout`` seconds."""
        told: dict[str, dict[str, float]] = {}
        self._names.wait_for([member.address for member in members], timeout)
        requests = [Request(member.address, Kind.COUNTERS, boot=member.boot_epoch) for member in members]
        with self._client.send(requests) as calls:
            for index, reply in calls.replies(timeout):
                if reply.ok:
                    told[members[index].node_id] = decode_counters(reply.body)
        return told

    def hot_pages(self, members: Sequence[Member], timeout: float) -> list[Answer]:
        """Return what those of the ``members`` say that tell within ``timeout`` seconds what their calls fetch most."""
        self._names.wait_for([member.address for member in members], timeout)
        return ask_members(self._client, members, Question(hot_pages=ASKED), timeout)[0]

    def namespaces(self, addresses: Sequence[str], timeout: float) -> frozenset[str]:
        """Return the namespaces of those nodes that tell theirs within ``timeout`` seconds, as they are set there."""
        answers, _ = ask_members(self._client, self._to_explain(addresses, timeout), Question(), timeout)
        return frozenset(answer.namespace for answer in answers)

    def explain(self, question: Question, addresses: Sequence[str], timeout: float) -> Explanation:
        """Return what all members together know of a page.

        Raises :class:`~p2pkv.errors.ControlError` if nobody says who they are, or none of them knows the question.
        """
        members = self._to_explain(addresses, timeout)
        answers, silent = ask_members(self._client, members, question, timeout)
        if not answers:
            who = ", ".join(silent[:8]) + (" and others" if len(silent) > 8 else "")
            raise ControlError(
                f"none of {len(silent)} nodes says what it knows of pages: {who}; are they of an older version?"
            )
        return explanation_of(question, answers, silent, everywhere=question.namespace is None)

    def explain_request(self, request: str, addresses: Sequence[str], timeout: float) -> RequestCalls:
        """Return what all members' calls found for an engine's request.

        Raises :class:`~p2pkv.errors.ControlError` if nobody says who they are.
        """
        return explain_request(self._client, self._to_explain(addresses, timeout), request, timeout)

    def _to_explain(self, addresses: Sequence[str], timeout: float) -> list[Member]:
        members = [member for member in self.members(addresses, timeout)[0].members if member.is_present]
        self._names.wait_for([member.address for member in members], timeout)
        return members

    def bump(self, namespace: str, addresses: Sequence[str], timeout: float) -> Bump:
        """Raise a namespace's epoch at every member that answers within ``timeout`` seconds.

        Raises :class:`~p2pkv.errors.ControlError` if nobody says who they are, and
        :class:`~p2pkv.errors.UsageError` for an empty name.
        """
        if not namespace:
            raise UsageError("a namespace is called by a text that is not empty")
        deadline = time.monotonic() + timeout
        known = self.members(addresses, timeout)[0]

        def members() -> list[Member]:
            nonlocal known
            left = max(0.0, deadline - time.monotonic())
            whom = dict.fromkeys([*addresses, *(member.address for member in known.members)])
            with suppress(ControlError):  # who was known before is told all the same
                known = self.members(list(whom), left)[0]
            present = [member for member in known.members if member.is_present]
            self._names.wait_for([member.address for member in present], left)
            return present

        def given_up() -> list[Member]:
            return [member for member in known.members if member.state is State.DEAD][:MOST]

        keeper = EpochKeeper(NamespaceEpochs(), self._client, members, given_up=given_up)
        return keeper.bump(namespace, deadline)

    def drain(
        self, node_id: str, addresses: Sequence[str], seconds: float | None, timeout: float
    ) -> Drained | None:
        """Have a node hand its pages over, for its own time if ``seconds`` is None; return what became of them.

        Blocks until it has said so, or for ``timeout`` seconds; None if it has gone before it could be asked again.
        Raises :class:`~p2pkv.errors.ControlError` if it is not there, or refuses.
        """
        until = time.monotonic() + timeout
        present = self._present(addresses, min(_MEET_S, timeout))
        if (member := present.get(node_id)) is None:
            raise ControlError(
                f"no live node is called {node_id!r}; there are {', '.join(sorted(present)[:8])}"
            )
        self._names.wait_for([member.address], timeout)
        request = Request(member.address, Kind.DRAIN, pack_drain(seconds), boot=member.boot_epoch)
        has_begun = False
        while (left := until - time.monotonic()) > 0:
            reply = self._client.ask(request, min(_ASK_AGAIN_S, left))
            if reply is None or reply.status is ReplyStatus.WRONG_BOOT:
                if has_begun and self._has_gone(member, addresses, left):
                    return None
            elif not reply.ok:
                is_old = reply.status is ReplyStatus.MALFORMED
                why = (
                    "its p2pkv can't be drained; upgrade it"
                    if is_old
                    else reply.body.decode(errors="replace")
                )
                raise ControlError(f"{node_id} refuses: {why}")
            elif (drained := decode_drained(reply.body)) is not None:
                return drained
            else:
                has_begun = True
                time.sleep(min(_LOOK_S, left))
        what = "is still handing its pages over" if has_begun else "did not answer"
        raise ControlError(f"{node_id} at {member.address} {what} after {timeout:g} s")

    def _present(self, addresses: Sequence[str], timeout: float) -> dict[str, Member]:
        members = self.members(addresses, timeout)[0].members
        return {member.node_id: member for member in members if member.is_present}

    def _has_gone(self, member: Member, addresses: Sequence[str], timeout: float) -> bool:
        """Whether a node is no member any more, in the boot that it was in, or nobody is there who could say so."""
        try:
            now = self._present(addresses, min(_ASK_AGAIN_S, timeout)).get(member.node_id)
        except ControlError:
            return True
        return now is None or now.boot_epoch != member.boot_epoch

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
