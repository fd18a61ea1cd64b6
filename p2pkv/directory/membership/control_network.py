"""Membership's network, over the control plane: probes and exchanges are answered by the peers' native threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pkv.control.patience import PATIENCE_S, PatientLines
from p2pkv.control.silence import tell_why_silent
from p2pkv.control.sockets import ControlClient, ControlServer, Request
from p2pkv.control.wire import PROBE_REPLY, Kind, Reply
from p2pkv.directory.membership.base import Late, ProbeReply


def _nobodys(blob: bytes) -> bool:
    return False


def _as_probe_reply(reply: Reply | None) -> ProbeReply | None:
    if reply is None or not reply.ok or len(reply.body) != PROBE_REPLY.size:
        return None
    key, digest = PROBE_REPLY.unpack(reply.body)
    return ProbeReply(node_key=key, boot_epoch=reply.boot, digest=digest)


def tell_once(
    client: ControlClient, messages: Sequence[tuple[str, bytes]], timeout: float
) -> list[ProbeReply | None]:
    """Hand messages to peers in parallel, as (address, message), from whichever thread; wait for no late answer."""
    out: list[ProbeReply | None] = [None] * len(messages)
    with client.send([Request(address, Kind.GOSSIP, blob) for address, blob in messages]) as calls:
        for index, reply in calls.replies(timeout):
            out[index] = _as_probe_reply(reply)
    return out


def _as_view(reply: Reply | None) -> bytes | None:
    return reply.body if reply is not None and reply.ok else None


class ControlNetwork:
    """Implements :class:`~p2pkv.directory.membership.base.Network`. The server and client stay the caller's.

    ``is_taken`` is shown each message that peers have handed to this node; what it takes, membership does not see.
    """

    def __init__(
        self, server: ControlServer, client: ControlClient, is_taken: Callable[[bytes], bool] = _nobodys
    ) -> None:
        self._server = server
        self._lines = PatientLines(client)
        self._is_taken = is_taken

    @property
    def address(self) -> str:
        return self._server.address

    def announce(self, node_key: int, boot_epoch: int) -> None:
        self._server.loop.announce(node_key, boot_epoch)

    def withdraw(self) -> None:
        self._server.loop.withdraw()

    def set_view(self, blob: bytes, digest: int) -> None:
        self._server.loop.set_view(blob, digest)

    def probe(
        self, addresses: Sequence[str], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[ProbeReply | None]:
        return self._probe([Request(address, Kind.PROBE) for address in addresses], timeout, meanwhile)

    def tell(self, messages: Sequence[tuple[str, bytes]], timeout: float) -> list[ProbeReply | None]:
        return self._probe([Request(address, Kind.GOSSIP, blob) for address, blob in messages], timeout)

    def _probe(
        self, requests: Sequence[Request], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[ProbeReply | None]:
        return [_as_probe_reply(reply) for reply in self._lines.ask(requests, timeout, meanwhile)]

    def exchange(self, addresses: Sequence[str], blob: bytes, timeout: float) -> list[bytes | None]:
        requests = [Request(address, Kind.EXCHANGE, blob) for address in addresses]
        return [_as_view(reply) for reply in self._lines.ask(requests, timeout)]

    def late(self, stretch: float) -> list[Late]:
        self._lines.patience_s = PATIENCE_S * stretch
        return [
            Late(
                request.address,
                asked_at,
                reply=_as_probe_reply(reply) if request.kind is Kind.PROBE else None,
                view=_as_view(reply) if request.kind is Kind.EXCHANGE else None,
            )
            for request, asked_at, reply in self._lines.late()
        ]

    def received(self, timeout: float) -> list[bytes]:
        blobs: list[bytes] = []
        event = self._server.loop.take(Kind.EXCHANGE, timeout)
        while event is not None:
            if not self._is_taken(event[1]):
                blobs.append(event[1])
            event = self._server.loop.take(Kind.EXCHANGE, 0.0)
        return blobs

    def resolve(self, address: str) -> Sequence[str]:
        return self._server.resolve(address)

    def listen_also(self, address: str) -> bool:
        return self._server.listen_also(address)

    def listen_no_more(self) -> None:
        self._server.listen_no_more()

    def why_silent(self, address: str, tell: Callable[[str], None]) -> None:
        tell_why_silent(address, tell)

    def wake(self) -> None:
        self._server.loop.wake(Kind.EXCHANGE)
