"""Two real nodes hand a request over, and one of them takes its memory back in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv.integrations.sglang.pd.rooms import Progress
from p2pkv.testing.ports import free_port
from sglang_servers import SETTLE_S, Servers

ROUNDS_S = 1.0
HARM_S = 20.0
"""At most; the first round or two do."""


@pytest.fixture(scope="module")
def both() -> Iterator[Servers]:
    servers = Servers(f"127.0.0.1:{free_port()}")
    yield servers
    servers.close()


@pytest.fixture
def servers(both: Servers) -> Iterator[Servers]:
    yield both
    both.heal()


def test_a_request_arrives_byte_for_byte_with_its_metadata(servers: Servers) -> None:
    servers.p.kv[:] = np.random.default_rng(1).integers(0, 256, servers.p.kv.shape, np.uint8)
    servers.p.aux[1] = 7
    room, incoming = servers.ask()
    servers.send(room)
    eventually(lambda: incoming.progress() is Progress.DONE, SETTLE_S)
    assert (servers.d.kv == servers.p.kv).all()
    assert (servers.d.aux[0] == 7).all()
    eventually(lambda: servers.prefill.progress(room)[0] is Progress.DONE, SETTLE_S)


def test_prefill_that_gives_up_tells_decode(servers: Servers) -> None:
    room, incoming = servers.ask()
    servers.prefill.close(room, "prefill aborted the request")
    eventually(lambda: servers.p.manager.told[room] == ["prefill aborted the request"], SETTLE_S)
    assert incoming.progress() is Progress.PENDING


def test_a_request_that_decode_gave_up_before_it_came_fails_when_it_comes(servers: Servers) -> None:
    servers._to_prefill.send_multipart([b"ABORT", b"77"])
    servers.ask()  # messages keep their order
    servers.p.manager.update_status(77, 1)
    servers.prefill.open(77)
    assert servers.p.manager.request_status[77] == 0


class Unstoppable:
    """An offer or a grant that goes on when it is ended: the safeguard that the tests below break on purpose."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.done, self.statuses = handle.done, handle.statuses

    def withdraw(self) -> Any:
        return self.statuses()

    revoke = withdraw


def moment(random: Random) -> None:
    """Let a moment pass that may end in the middle of a pull; a sleep is too coarse for that."""
    end = time.monotonic() + random.random() * 0.02
    while time.monotonic() < end:
        pass


def rounds_of_reused_source(servers: Servers, seconds: float) -> int:
    """Let prefill reuse its pages at random moments; return how often decode took other bytes for the request's."""
    random, wrong, end = Random(1), 0, time.monotonic() + seconds
    while time.monotonic() < end and not wrong:
        right = random.randrange(1, 100)
        servers.p.kv[:] = right
        room, incoming = servers.ask()
        servers.send(room)
        moment(random)
        servers.prefill.close(room, None)
        servers.p.kv[:] = 200
        settled = time.monotonic() + 0.2
        while incoming.progress() is Progress.PENDING and time.monotonic() < settled:
            time.sleep(0.005)
        wrong += incoming.progress() is Progress.DONE and bool((servers.d.kv != right).any())
        incoming.close()
    return wrong


def rounds_of_reused_destination(servers: Servers, seconds: float) -> int:
    """Let decode reuse its pages at random moments; return how often the request still wrote to them."""
    random, written, end = Random(2), 0, time.monotonic() + seconds
    servers.p.kv[:] = 100
    while time.monotonic() < end and not written:
        room, incoming = servers.ask()
        servers.send(room)
        moment(random)
        incoming.close()
        servers.d.kv[:] = 0
        time.sleep(0.05)
        written += bool(servers.d.kv.any())
        servers.prefill.close(room, None)
    return written


def test_pages_that_prefill_reuses_are_never_taken_for_the_requests(servers: Servers) -> None:
    assert rounds_of_reused_source(servers, ROUNDS_S) == 0


def test_without_withdrawing_they_are(servers: Servers) -> None:
    put = servers.put
    servers.put = lambda *given, **options: Unstoppable(put(*given, **options))
    assert rounds_of_reused_source(servers, HARM_S) > 0


def test_nothing_writes_to_pages_that_decode_took_back(servers: Servers) -> None:
    assert rounds_of_reused_destination(servers, ROUNDS_S) == 0


def test_without_revoking_something_does(servers: Servers) -> None:
    make, held = servers.grant, []  # a grant that nobody holds is revoked

    def grant(*given: Any, **options: Any) -> Unstoppable:
        held.append(Unstoppable(make(*given, **options)))
        return held[-1]

    servers.grant = grant
    assert rounds_of_reused_destination(servers, HARM_S) > 0
