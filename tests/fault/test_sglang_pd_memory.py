"""Two real nodes hand a request over, and one of them takes its memory back in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from cluster import eventually, free_port
from p2pkv import Config, Node
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.sglang_pd_decode import DecodeSide
from p2pkv.integrations.sglang_pd_prefill import Chunk, PrefillSide
from p2pkv.integrations.sglang_pd_rooms import Incoming, Progress
from p2pkv.integrations.sglang_pd_rows import RequestRows, memories
from p2pkv.integrations.sglang_pd_wire import node_id, unpack
from sglang_manager import Manager

N_BUFFERS, N_PAGES, PAGE_BYTES = 4, 16, 256 << 10
PAGES = np.arange(N_PAGES, dtype=np.int32)
SETTLE_S = 10.0
ROUNDS_S = 1.0
HARM_S = 20.0
"""At most; the first round or two do."""


class Side:
    """One server: buffers as SGLang has them, a manager, a node."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], join: Sequence[str], *, readable: bool
    ) -> None:
        self.kv = np.zeros((N_BUFFERS, N_PAGES, PAGE_BYTES), np.uint8)
        self.aux = np.zeros((4, 64), np.uint8)
        self.args = SimpleNamespace(
            kv_data_ptrs=[buffer.ctypes.data for buffer in self.kv],
            kv_data_lens=[buffer.nbytes for buffer in self.kv],
            kv_item_lens=[PAGE_BYTES] * N_BUFFERS,
            aux_data_ptrs=[self.aux.ctypes.data],
            aux_data_lens=[self.aux.nbytes],
            aux_item_lens=[64],
            state_types=[],
            state_data_ptrs=[],
            state_data_lens=[],
            state_item_lens=[],
        )
        self.manager = Manager(self.args, context)
        self.node = Node.start(
            Config(node_id=node_id("127.0.0.1", self.manager.rank_port), join=list(join), pool_size="64KiB")
        )
        for address, nbytes in memories(self.args):
            self.node.register_address(address, nbytes, readable=readable)
        self.rows = RequestRows.of(self.args)
        self.boundary = Boundary("a test", self.node.metrics)

    def members(self) -> dict[str, int]:
        return {m.node_id: m.boot_epoch for m in self.node.members()}


class Servers:
    """A prefill and a decode server in this process, and one request after the other between them."""

    def __init__(self, join: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.p = Side(self._context, [join], readable=True)
        self.d = Side(self._context, [join], readable=False)
        eventually(lambda: len(self.d.members()) == len(self.p.members()) == 2, SETTLE_S)
        self.heal()
        self.prefill = PrefillSide(
            self.p.manager,
            self.p.rows,
            self.p.boundary,
            lambda *given, **options: self.put(*given, **options),
        )
        self.decode = DecodeSide(
            self.d.manager,
            self.d.rows,
            self.d.boundary,
            lambda *given, **options: self.grant(*given, **options),
            self.d.members,
        )
        self._to_prefill = self._context.socket(zmq.PUSH)
        self._to_prefill.connect(f"tcp://127.0.0.1:{self.p.manager.rank_port}")
        self._n_rooms = 0

    def heal(self) -> None:
        """Have both sides use their nodes as they are."""
        self.put: Any = self.p.node.transfers.put_async
        self.grant: Any = self.d.node.transfers.grant

    def ask(self) -> tuple[int, Incoming]:
        """Have decode grant all its pages to a new request, and prefill know of it."""
        self._n_rooms += 1
        room = self._n_rooms
        for manager in (self.p.manager, self.d.manager):
            manager.update_status(room, 1)
        self.prefill.open(room)
        info = {"rank_ip": "127.0.0.1", "rank_port": self.p.manager.rank_port, "is_dummy": False}
        receiver = SimpleNamespace(bootstrap_addr="a", bootstrap_room=room, bootstrap_infos=[info])
        incoming = self.decode.grant(receiver, PAGES, 0, None)
        message = self.decode.wanted(room, PAGES, None, 0, 1, is_dummy=False)
        assert unpack(message) is not None
        self._to_prefill.send_multipart(message)
        eventually(lambda: room in self.p.manager.transfer_infos, SETTLE_S)
        return room, incoming

    def send(self, room: int, n_chunks: int = 4) -> None:
        """Have prefill offer everything, in chunks."""
        for pages in np.array_split(PAGES, n_chunks):
            first = int(pages[0])
            is_last = first + len(pages) == N_PAGES
            self.prefill.send(room, Chunk(pages, first, is_last, 1 if is_last else None, None, ()))

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self._to_prefill.close(linger=0)
        for side in (self.p, self.d):
            side.node.close()
            side.manager.close()
        self._context.term()


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
