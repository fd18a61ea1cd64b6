"""Handshakes that go wrong on the other side: they cost that connection, and no thread of ours."""

from __future__ import annotations

from pathlib import Path

from cluster import eventually
from p2pkv.directory.view import View
from p2pkv.errors import TransportError
from p2pkv.transports.faulty import FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import Pair


class Moody(FaultyTransport):
    """Fails at the first handshakes, each time otherwise."""

    def __init__(self) -> None:
        super().__init__(TcpTransport())
        self.failures: list[Exception] = [
            # such text comes from paths and peers that are no UTF-8
            TransportError("no way through \udcff"),
            KeyError("a bug in a transport"),
            OSError("\udcff"),
        ]

    @property
    def native(self) -> None:
        return None

    def accept(self, remote: bytes) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return super().accept(remote)


def test_a_transport_that_fails_at_handshakes_is_asked_again(tmp_path: Path) -> None:
    moody: list[Moody] = []

    def extra() -> list[Moody]:
        moody.append(Moody())
        return [moody[-1]]

    pair = Pair(tmp_path, extra=extra, transports=["tcp"])  # type: ignore[arg-type]
    keys = pair.publish()
    # Over tcp meanwhile: what fails is left out for a while, which is forgotten here.
    assert pair.fetch_is_right(keys)
    owner, peers, view = moody[0], pair.reader._parts.peers, pair.reader._parts.membership.view()
    while owner.failures:
        before = len(owner.failures)
        peers.set_view(View())
        peers.set_view(view)
        pair.fetch_is_right(keys)
        assert len(owner.failures) == before - 1
    eventually(lambda: pair.fetch_is_right(keys), 5.0)
    pair.close()
