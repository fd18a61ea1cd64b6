"""Prefill's and decode's side of SGLang's transfer backend, each alone, with a manager as SGLang has it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_sglang_pd import PEER_LOST, Transfers, items, kv_args

from cluster import eventually
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.sglang.pd.common import Poll
from p2pkv.integrations.sglang.pd.decode import DecodeSide
from p2pkv.integrations.sglang.pd.prefill import Chunk, PrefillSide
from p2pkv.integrations.sglang.pd.rooms import Incoming, Progress
from p2pkv.integrations.sglang.pd.rows import RequestRows
from p2pkv.integrations.sglang.pd.wire import Wanted, node_id, pack, unpack
from p2pkv.metrics import Metrics
from p2pkv.tracing import TRANSFERS, Spans
from sglang_manager import Manager
from spans import exported_to

ROOM = 5
SETTLE_S = 10.0
PREFILL = {"rank_ip": "10.0.0.1", "rank_port": 7, "is_dummy": False}
PREFILL_NODE = node_id("10.0.0.1", 7)


def traced(transfers: Transfers, spans: Spans | None) -> Transfers:
    """Have spans of what is offered and granted, if there are any."""
    if spans is not None:
        spans.trace(transfers, {name: TRANSFERS[name] for name in ("put_async", "grant")})
    return transfers


@pytest.fixture
def manager() -> Iterator[Manager]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    manager = Manager(kv_args(), context)
    manager.update_status(ROOM, Poll.BOOTSTRAPPING)
    yield manager
    manager.close()
    context.term()


class Prefill:
    """Prefill's side, and a decode server that sends to it."""

    def __init__(self, manager: Manager, spans: Spans | None = None) -> None:
        self.transfers = traced(Transfers(), spans)
        self.manager = manager
        self.side = PrefillSide(
            manager, RequestRows.of(manager.kv_args), Boundary("a test", Metrics()), self.transfers
        )
        self.side.open(ROOM)
        self._socket = manager.server_socket.context.socket(zmq.PUSH)
        self._socket.connect(f"tcp://127.0.0.1:{manager.rank_port}")

    def wants(self, **changed: object) -> None:
        """Have decode want two pages."""
        wanted = Wanted(
            room=ROOM,
            name="r",
            node_id="d",
            host="h",
            port=9,
            n_pages=2,
            n_states=(1,),
            decode_prefix_len=0,
            n_peers=1,
            is_dummy=False,
            shape=RequestRows.of(self.manager.kv_args).shape,
        )
        self.tell(pack(msgspec.structs.replace(wanted, **changed)))

    def tell(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def reaches(self, status: Poll) -> None:
        eventually(lambda: self.manager.request_status.get(ROOM) == status, SETTLE_S)

    def send(self, *pages: int, is_last: bool = True, first_page: int = 0) -> None:
        slot = 1 if is_last else None
        self.side.send(ROOM, Chunk(items(*pages), first_page, is_last, slot, [items(3)], ()))

    def close(self) -> None:
        self._socket.close(linger=0)
        self.side.stop()


@pytest.fixture
def prefill(manager: Manager) -> Iterator[Prefill]:
    prefill = Prefill(manager)
    yield prefill
    prefill.close()


def test_chunks_are_offered_in_order_and_the_metadata_with_the_last(prefill: Prefill) -> None:
    prefill.wants()
    prefill.reaches(Poll.WAITING_FOR_INPUT)
    prefill.send(4, is_last=False)
    prefill.send(2, first_page=1)
    eventually(lambda: len(prefill.transfers.made) == 3, SETTLE_S)
    assert [made.first_row for made in prefill.transfers.made] == [0, 6, 12]
    for made in prefill.transfers.made:
        made.rows[:] = 0
    eventually(lambda: prefill.side.progress(ROOM)[0] is Progress.DONE, SETTLE_S)


def test_offers_are_named_after_their_room_in_spans(manager: Manager) -> None:
    exporter = InMemorySpanExporter()
    prefill = Prefill(manager, Spans({}))
    try:
        with exported_to(exporter):
            prefill.wants()
            prefill.reaches(Poll.WAITING_FOR_INPUT)
            prefill.send(4, 2)
            eventually(lambda: len(exporter.get_finished_spans()) == 2, SETTLE_S)
            rooms = {(span.attributes or {})["p2pkv.request"] for span in exporter.get_finished_spans()}
    finally:
        prefill.close()
    assert rooms == {str(ROOM)}


def test_every_decode_rank_that_wants_a_request_gets_it(prefill: Prefill) -> None:
    prefill.wants(n_peers=2, node_id="d1")
    prefill.wants(n_peers=2, node_id="d2")
    prefill.reaches(Poll.WAITING_FOR_INPUT)
    prefill.send(0, 1)
    eventually(lambda: len(prefill.transfers.made) == 4, SETTLE_S)


def test_a_rank_that_decode_needs_nothing_of_is_done_with_its_last_chunk(prefill: Prefill) -> None:
    prefill.wants(is_dummy=True)
    prefill.reaches(Poll.WAITING_FOR_INPUT)
    prefill.send(0, 1)
    assert prefill.manager.request_status[ROOM] == Poll.SUCCESS
    assert not prefill.transfers.made


def test_servers_with_different_kv_fail_the_request_on_both_sides(prefill: Prefill) -> None:
    other = RequestRows.of(kv_args(kv_item_lens=[32] * 6)).shape
    prefill.wants(shape=other)
    prefill.reaches(Poll.FAILED)
    eventually(lambda: bool(prefill.manager.told[ROOM]), SETTLE_S)
    assert "different KV" in str(prefill.manager.told[ROOM][0])


@pytest.mark.parametrize("changed", [{"n_pages": 1}, {"n_pages": 3}, {"n_states": (2,)}])
def test_a_request_of_other_counts_fails_and_offers_no_metadata(
    prefill: Prefill, changed: dict[str, Any]
) -> None:
    prefill.wants(**changed)
    prefill.reaches(Poll.WAITING_FOR_INPUT)
    prefill.send(0, 1)
    eventually(lambda: prefill.side.progress(ROOM)[0] is Progress.FAILED, SETTLE_S)
    assert "decode wants" in str(prefill.side.progress(ROOM)[1])
    assert not prefill.transfers.made


def test_decode_hears_why_prefill_failed(prefill: Prefill) -> None:
    prefill.wants()
    prefill.reaches(Poll.WAITING_FOR_INPUT)
    prefill.side.close(ROOM, "reason")
    prefill.side.close(ROOM, "again")
    eventually(lambda: prefill.manager.told[ROOM] == ["reason"], SETTLE_S)


def test_decode_that_comes_too_late_hears_it_as_well(prefill: Prefill) -> None:
    prefill.side.close(ROOM, "reason")
    prefill.wants()
    eventually(lambda: prefill.manager.told[ROOM] == ["reason"], SETTLE_S)
    prefill.side.open(ROOM)
    prefill.wants()
    prefill.reaches(Poll.WAITING_FOR_INPUT)


def test_an_abort_fails_the_request_at_prefill(prefill: Prefill) -> None:
    prefill.wants()
    prefill.tell([b"ABORT", str(ROOM).encode(), b"10.0.0.2", b"1"])
    prefill.reaches(Poll.FAILED)


def test_malformed_messages_harm_nobody(prefill: Prefill) -> None:
    for frames in ([b""], [b"ABORT", b"x"], [b"P2PKV-PD-1", b"\xff"], [b"GET / HTTP/1.1"]):
        prefill.tell(frames)
    prefill.wants()
    prefill.reaches(Poll.WAITING_FOR_INPUT)


class Decode:
    """Decode's side, with one prefill node in the cluster."""

    def __init__(self, manager: Manager, spans: Spans | None = None) -> None:
        self.transfers = traced(Transfers(), spans)
        self.members = {PREFILL_NODE: 1}
        self.manager = manager
        rows = RequestRows.of(manager.kv_args)
        boundary = Boundary("a test", Metrics())
        self.side = DecodeSide(manager, rows, boundary, self.transfers.grant, lambda: dict(self.members))
        manager.connection_pool["a_0_0_0"] = [PREFILL]
        manager.prefill_info_table["a"] = object()

    def grant(self) -> Incoming:
        receiver: Any = SimpleNamespace(
            bootstrap_addr="a",
            bootstrap_room=ROOM,
            bootstrap_infos=[PREFILL],
            prefill_info=SimpleNamespace(attn_tp_size=1, pp_size=1),
        )
        return self.side.grant(receiver, items(1, 2), 0, [items(4)])

    def fails(self) -> str:
        """Wait until the request has failed; return why."""
        eventually(lambda: self.manager.request_status[ROOM] == Poll.FAILED, SETTLE_S)
        return self.manager.failure_records[ROOM]


@pytest.fixture
def decode(manager: Manager) -> Iterator[Decode]:
    decode = Decode(manager)
    yield decode
    decode.side.stop()


def test_prefill_is_told_what_was_granted(decode: Decode) -> None:
    incoming = decode.grant()
    wanted = unpack(decode.side.wanted(ROOM, items(1, 2), [items(4)], 32, 1, is_dummy=False))
    assert wanted is not None
    assert (wanted.name, wanted.n_pages, wanted.n_states) == (incoming.name, 2, (1,))
    assert wanted.decode_prefix_len == 32
    assert sum(len(made.spans) for made in decode.transfers.made) == 2 * 6 + 2 + 2


def test_grants_are_named_after_their_room_in_spans(manager: Manager) -> None:
    exporter = InMemorySpanExporter()
    decode = Decode(manager, Spans({}))
    try:
        with exported_to(exporter):
            decode.grant().close()
            [span] = exporter.get_finished_spans()
    finally:
        decode.side.stop()
    assert span.attributes is not None
    assert span.attributes["p2pkv.request"] == str(ROOM)
    assert str(span.attributes["p2pkv.offer"]).startswith("sglang ")


def test_each_attempt_has_a_name_of_its_own(decode: Decode) -> None:
    assert decode.grant().name != decode.grant().name


@pytest.mark.parametrize("members", [{}, {PREFILL_NODE: 2}])
def test_a_dead_prefill_fails_its_requests_and_is_asked_anew(decode: Decode, members: dict[str, int]) -> None:
    incoming = decode.grant()
    decode.members = members
    assert "dead or was started anew" in decode.fails()
    assert decode.manager.connection_pool == decode.manager.prefill_info_table == {}
    incoming.close()


def test_a_prefill_that_joins_late_is_waited_for(decode: Decode) -> None:
    decode.members = {}
    incoming = decode.grant()
    assert incoming.producers[0].boot is None
    decode.members = {PREFILL_NODE: 1}
    eventually(lambda: incoming.producers[0].boot == 1, SETTLE_S)
    assert decode.manager.request_status[ROOM] == Poll.BOOTSTRAPPING


def test_a_prefill_of_another_cluster_is_not_waited_for_for_ever(decode: Decode) -> None:
    decode.members = {}
    incoming = decode.grant()
    incoming.since -= 60
    assert "not in the cluster" in decode.fails()


def test_a_request_that_was_dropped_is_not_watched(decode: Decode) -> None:
    incoming = decode.grant()
    del incoming
    decode.members = {}
    eventually(lambda: not decode.side._incoming, SETTLE_S)


def test_a_prefill_server_that_does_not_answer_holds_nobody_up(decode: Decode) -> None:
    asked: list[str] = []

    def look(address: str) -> bool:
        asked.append(address)
        return True

    eventually(lambda: decode.side.find("a", look), SETTLE_S)
    assert asked == ["a"]


def test_why_a_prefill_server_does_not_fit_is_remembered_until_it_does(decode: Decode) -> None:
    def look(address: str) -> bool:
        raise RuntimeError("page_size=16 here, 64 there")

    with pytest.raises(RuntimeError):
        eventually(lambda: decode.side.find("a", look), SETTLE_S)
    assert decode.side.why_not_found("a") == "page_size=16 here, 64 there"
    eventually(lambda: decode.side.find("a", lambda address: True), SETTLE_S)
    assert "did not answer" in decode.side.why_not_found("a")


def test_rows_that_are_lost_fail_the_request(decode: Decode) -> None:
    incoming = decode.grant()
    decode.transfers.made[0].rows[:] = PEER_LOST
    assert incoming.progress() is Progress.FAILED
    assert np.all(decode.transfers.made[0].statuses() == PEER_LOST)
