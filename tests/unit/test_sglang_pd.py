"""SGLang's transfer backend without SGLang: how requests become rows, and who may touch which memory until when."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pkv.errors import ConfigError, UsageError
from p2pkv.integrations.sglang import plugin
from p2pkv.integrations.sglang.pd.common import unsupported
from p2pkv.integrations.sglang.pd.rooms import Absences, Incoming, Outgoing, Producer, Progress, Target, flaw
from p2pkv.integrations.sglang.pd.rows import (
    Buffers,
    RequestRows,
    Spans,
    memories,
    state_items,
)
from p2pkv.integrations.sglang.pd.settings import pd_config, require_known_memory
from p2pkv.integrations.sglang.pd.wire import TAG, Wanted, node_id, pack, unpack

N_LAYERS, N_PAGES, PAGE_BYTES = 3, 10, 64
OK, PENDING, REJECTED, CANCELED, PEER_LOST = 0, 1, 3, 4, 5


def kv_args(**changed: object) -> SimpleNamespace:
    """Return what SGLang says of three layers of ten pages, one state of two tensors, and two metadata buffers."""
    args = {
        "kv_data_ptrs": [0x10000 * (i + 1) for i in range(2 * N_LAYERS)],
        "kv_data_lens": [N_PAGES * PAGE_BYTES] * 2 * N_LAYERS,
        "kv_item_lens": [PAGE_BYTES] * 2 * N_LAYERS,
        "aux_data_ptrs": [0x200000, 0x210000],
        "aux_data_lens": [4 * 64, 4 * 8],
        "aux_item_lens": [64, 8],
        "state_types": ["mamba"],
        "state_data_ptrs": [[0x300000, 0x310000]],
        "state_data_lens": [[5 * 128, 5 * 32]],
        "state_item_lens": [[128, 32]],
    }
    return SimpleNamespace(**args | changed)


def items(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@dataclass
class Transfers:
    """``node.transfers`` of a test: rows go nowhere, their statuses are set by hand."""

    made: list[Handle] = field(default_factory=list)
    met: list[str] = field(default_factory=list)

    def meet(self, node_id: str, *, timeout: float | None = None) -> bool:
        self.met.append(node_id)
        return True

    def put_async(self, node_id: str, request: str, spans: Spans, *, first_row: int = 0) -> Handle:
        self.made.append(Handle(request, first_row, spans))
        return self.made[-1]

    def grant(
        self, request: str, spans: Spans, *, first_row: int = 0, timeout: float | None = None
    ) -> Handle:
        self.made.append(Handle(request, first_row, spans))
        return self.made[-1]


class Handle:
    """An offer or a grant."""

    def __init__(self, request: str, first_row: int, spans: Spans) -> None:
        self.request, self.first_row, self.spans = request, first_row, spans
        self.rows = np.full(len(spans), PENDING, np.uint8)
        self.is_over = False

    def done(self) -> bool:
        return not (self.rows == PENDING).any()

    def statuses(self) -> np.ndarray:
        return self.rows.copy()

    def withdraw(self) -> np.ndarray:
        self.is_over = True
        self.rows[self.rows == PENDING] = REJECTED
        return self.rows

    revoke = withdraw


# --- rows


SPLITS = {
    "pp_size": "pipeline parallelism of decode",
    "attn_cp_size": "attention context parallelism",
    "dcp_size": "decode context parallelism",
    "kv_shard_size": "KV cache sharding",
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_way_of_splitting_a_model_that_is_not_known_is_named(name: str) -> None:
    sizes: Any = SimpleNamespace(**dict.fromkeys(SPLITS, 1))
    assert unsupported(sizes, is_prefill=False) is None
    setattr(sizes, name, 2)
    said = f"p2pkv's transfer backend does not do {SPLITS[name]} (size 2)"
    assert unsupported(sizes, is_prefill=False) == said
    assert unsupported(sizes, is_prefill=True) == (None if name == "pp_size" else said)


def test_both_servers_number_the_same_rows_alike_wherever_their_pages_lie() -> None:
    prefill, decode = RequestRows.of(kv_args()), RequestRows.of(kv_args())
    source = np.concatenate(
        [prefill.pages.spans(items(7, 2)), prefill.pages.spans(items(5)), prefill.end([items(4)], 3)]
    )
    destination = np.concatenate([decode.pages.spans(items(0, 1, 9)), decode.end([items(1)], 0)])
    assert prefill.shape == decode.shape
    assert (source[:, 1] == destination[:, 1]).all()
    assert source[2 * 2 * N_LAYERS, 0] == 0x10000 + 5 * PAGE_BYTES
    assert destination[2 * 2 * N_LAYERS, 0] == 0x10000 + 9 * PAGE_BYTES
    assert len(destination) == 3 * 2 * N_LAYERS + 2 + 2


def test_an_item_that_no_buffer_has_is_refused() -> None:
    rows = RequestRows.of(kv_args())
    for wrong in (items(N_PAGES), items(0, -1)):
        with pytest.raises(UsageError):
            rows.pages.spans(wrong)
    with pytest.raises(UsageError):
        rows.end([items(0)], 4)


def test_buffers_without_bytes_have_no_rows() -> None:
    buffers = Buffers.of([0x1000, 0x2000], [0, 640], [64, 64])
    assert len(buffers.spans(items(1, 2))) == 2


def test_states_that_sglang_leaves_out_have_no_rows() -> None:
    assert [len(i) for i in state_items(None, 2)] == [0, 0]
    assert [len(i) for i in state_items([None, [3, 4]], 2)] == [0, 2]


def test_buffers_that_overlap_are_one_memory() -> None:
    args = kv_args(kv_data_ptrs=[0x10000, 0x10000, 0x10100, 0x40000, 0x50000, 0x60000])
    got = memories(args)
    assert got[0] == (0x10000, 0x100 + N_PAGES * PAGE_BYTES)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(got))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_item_lens": [32] * 2 * N_LAYERS}, "pages have"),
        ({"state_types": ["swa"]}, "states are"),
        ({"aux_item_lens": [64, 4]}, "metadata has"),
    ],
)
def test_servers_with_different_kv_say_what_differs(changed: dict[str, object], said: str) -> None:
    mine, theirs = RequestRows.of(kv_args()).shape, RequestRows.of(kv_args(**changed)).shape
    difference = mine.difference(theirs)
    assert difference is not None
    assert said in difference
    assert mine.difference(RequestRows.of(kv_args()).shape) is None


def test_two_models_of_one_form_are_told_apart() -> None:
    mine, theirs = RequestRows.of(kv_args(), "base").shape, RequestRows.of(kv_args(), "tuned").shape
    assert mine.difference(theirs) == "the model is 'base' here and 'tuned' there"
    assert unpack(pack(wanted(shape=theirs))) == wanted(shape=theirs)


# --- messages


def wanted(**changed: object) -> Wanted:
    return msgspec.structs.replace(
        Wanted(
            room=2**63 - 2,
            name="sglang a 1",
            node_id="sglang-10.0.0.1:5",
            host="10.0.0.1",
            port=5,
            n_pages=3,
            n_states=(1,),
            decode_prefix_len=0,
            n_peers=1,
            is_dummy=False,
            shape=RequestRows.of(kv_args()).shape,
        ),
        **changed,
    )


def test_what_decode_wants_arrives_as_it_was_sent() -> None:
    assert unpack(pack(wanted())) == wanted()
    assert unpack([b"ABORT", b"1"]) is None


@pytest.mark.parametrize(
    "frames",
    [
        [TAG],
        [TAG, b"\xff"],
        [TAG, msgspec.msgpack.encode({"room": "x"})],
        [TAG, b"", b""],
        pack(wanted(n_pages=-1)),
        pack(wanted(n_peers=0)),
        [TAG, b"\xc1" * (2 << 20)],
    ],
)
def test_a_malformed_message_is_an_error_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(ValueError):
        unpack(frames)


# --- one request


def test_prefill_is_done_when_decode_has_every_row() -> None:
    transfers = Transfers()
    outgoing = Outgoing(transfers)
    spans = RequestRows.of(kv_args()).pages.spans(items(1, 2))
    outgoing.offer(Target("d", "r"), 6, spans)
    assert outgoing.progress() is Progress.PENDING
    transfers.made[0].rows[:] = OK
    assert outgoing.progress() is Progress.PENDING, "more chunks may come"
    outgoing.complete()
    assert outgoing.progress() is Progress.DONE
    assert (transfers.made[0].request, transfers.made[0].first_row) == ("r", 6)


def test_prefill_fails_with_the_first_row_that_does() -> None:
    transfers = Transfers()
    outgoing = Outgoing(transfers)
    outgoing.offer(Target("d", "r"), 0, np.ones((2, 2), np.int64))
    transfers.made[0].rows[:] = OK, PEER_LOST
    assert outgoing.progress() is Progress.FAILED
    assert "lost" in str(outgoing.failure)
    outgoing.offer(Target("d", "r"), 2, np.ones((2, 2), np.int64))
    assert len(transfers.made) == 1, "what can't succeed any more is not offered"


def test_decodes_node_is_met_before_it_is_offered_anything() -> None:
    transfers = Transfers()
    outgoing = Outgoing(transfers)
    outgoing.offer(Target("d", "r"), 0, np.ones((0, 2), np.int64))
    assert transfers.met == [], "a chunk without rows needs nobody"
    outgoing.offer(Target("d", "r"), 0, np.ones((2, 2), np.int64))
    assert transfers.met == ["d"]


def test_what_is_closed_while_decodes_node_is_met_is_not_offered() -> None:
    class Slow(Transfers):
        def meet(self, node_id: str, *, timeout: float | None = None) -> bool:
            outgoing.close()
            return True

    transfers = Slow()
    outgoing = Outgoing(transfers)
    outgoing.offer(Target("d", "r"), 0, np.ones((2, 2), np.int64))
    assert transfers.made == []


def test_nothing_is_offered_once_prefill_may_reuse_its_pages() -> None:
    transfers = Transfers()
    outgoing = Outgoing(transfers)
    outgoing.offer(Target("d", "r"), 0, np.ones((2, 2), np.int64))
    outgoing.close()
    outgoing.offer(Target("d", "r"), 2, np.ones((2, 2), np.int64))
    assert [made.is_over for made in transfers.made] == [True]


def test_decode_is_done_when_every_row_is_there() -> None:
    transfers = Transfers()
    incoming = Incoming("r", "a", 1)
    incoming.grant(transfers.grant, np.ones((3, 2), np.int64), timeout=1.0)
    (made,) = transfers.made
    made.rows[:2] = OK
    assert incoming.progress() is Progress.PENDING
    made.rows[:] = OK
    assert incoming.progress() is Progress.DONE
    assert made.request == "r"


def test_decode_revokes_what_it_granted_before_its_pages_are_reused() -> None:
    transfers = Transfers()
    incoming = Incoming("r", "a", 1)
    incoming.grant(transfers.grant, np.ones((3, 2), np.int64), timeout=1.0)
    assert not incoming.is_closed
    incoming.close()
    assert incoming.is_closed
    assert [made.is_over for made in transfers.made] == [True]
    assert incoming.progress() is Progress.FAILED


def test_a_failure_is_said_in_words() -> None:
    assert flaw(np.array([OK, PENDING], np.uint8)) is None
    said = flaw(np.array([OK, CANCELED, PEER_LOST, PEER_LOST], np.uint8))
    assert said is not None
    assert said.startswith("of 4 pieces of KV 2 were lost")


def test_a_prefill_in_another_boot_is_not_the_one_that_was_asked() -> None:
    producers = {Producer("p", 7), Producer("p", 6), Producer("q", None)}
    assert Absences().gone(producers, {"p": 7}.get, 0.0) == {Producer("p", 6)}


def test_a_prefill_is_gone_when_it_has_been_no_member_for_a_while() -> None:
    absences, p, q = Absences(grace=3.0), Producer("p", 7), Producer("q", 7)
    both, none = {"p": 7, "q": 7}, dict[str, int]()
    looks: list[tuple[float, dict[str, int], set[Producer]]] = [
        (0.0, none, set()),
        (2.9, {"q": 7}, set()),
        (3.0, {"q": 7}, {p}),
        (3.5, both, set()),
        (4.0, none, set()),
        (6.9, {"p": 7}, set()),
        (7.0, none, {q}),
    ]
    for now, members, gone in looks:
        assert absences.gone({p, q}, members.get, now) == gone, now
    absences.gone((), none.get, 8.0)  # nobody waits for either: what was seen of them is old then
    assert absences.gone({p, q}, none.get, 100.0) == set()


# --- settings


def test_each_server_knows_the_others_node() -> None:
    config = pd_config(
        "10.0.0.1", 4711, index=1, environ={"P2PKV_JOIN": "127.0.0.1:7400", "P2PKV_METRICS_PORT": "90"}
    )
    assert config.node_id == node_id("10.0.0.1", 4711)
    assert config.metrics_port == 91


def test_settings_for_the_page_cache_in_the_same_environment_do_no_harm() -> None:
    environ = {
        "P2PKV_JOIN": "127.0.0.1:7400",
        "P2PKV_POOL_SIZE": "64GiB",
        "P2PKV_DISK_SIZE": "1GiB",
        "P2PKV_NODE_ID": "n",
    }
    config = pd_config("h", 1, index=0, environ=environ)
    assert config.pool_nbytes < 1 << 20
    assert not config.disk_nbytes


def test_servers_that_could_not_meet_don_t_start() -> None:
    with pytest.raises(ConfigError, match="P2PKV_JOIN"):
        pd_config("h", 1, index=0, environ={})
    met = pd_config("h", 1, index=0, environ={"P2PKV_MEMBERSHIP": "etcd://h:2379"})
    assert met.store is not None


def test_kv_on_devices_without_cuda_is_refused_at_start() -> None:
    require_known_memory("cpu")
    require_known_memory("cuda")
    with pytest.raises(ConfigError, match="'npu'"):
        require_known_memory("npu")


# --- the plugin


def test_only_our_own_backend_is_answered_for() -> None:
    asked = []

    def original(backend: object, kind: object) -> str:
        asked.append(backend)
        return "sglang's"

    ours, other = SimpleNamespace(value="p2pkv"), SimpleNamespace(value="nixl")
    assert plugin._get_kv_class(original, other, SimpleNamespace(value="sender")) == "sglang's"
    assert plugin._get_kv_class(original, ours, SimpleNamespace(value="kvargs")) == "sglang's"
    sender = plugin._get_kv_class(original, ours, SimpleNamespace(value="sender"))
    assert getattr(sender, "__name__", "") == "P2PKVSender"
    assert asked == [other, ours]
