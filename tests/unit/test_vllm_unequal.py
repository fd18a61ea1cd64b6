"""vLLM instances that share a model unequally hand prompts over: every head of every layer and token, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.loads import Loads
from p2pkv.integrations.vllm_connector.shares import Share, names, spell
from p2pkv.integrations.vllm_connector.wants import Want, WantedGroup
from p2pkv.testing.lateness import returns_within
from p2pkv.testing.ports import free_port
from p2pkv.transfers import Offer, Transfers
from vllm_ranks import Model, Server, Shape

SIZES = (1, 2, 4, 8)
SETTLE_S = 60.0
_numbers = count(1)


@pytest.fixture(scope="module")
def all_nodes() -> Iterator[list[Node]]:
    """Eight for prefill, eight for decode, which all servers here share."""
    join = f"127.0.0.1:{free_port()}"
    started = [Node.start(Config(node_id=f"n{i}", join=[join], pool_size=0)) for i in range(16)]
    eventually(lambda: all(len(node.members()) == len(started) for node in started), SETTLE_S)
    yield started
    with ThreadPoolExecutor(len(started)) as pool:
        list(pool.map(lambda node: node.close(), started))


_servers: list[Server] = []
"""Those of the test that runs: what all tests left open were two thousand threads, which cost each test time."""


@pytest.fixture
def nodes(all_nodes: list[Node]) -> Iterator[list[Node]]:
    yield all_nodes
    for server in _servers:
        server.end()
    _servers.clear()
    for node in all_nodes:
        node._parts.registrations.close()


def serve(*arguments: Any, **settings: Any) -> Server:
    """Start a server, which ends with the test."""
    _servers.append(Server(*arguments, **settings))
    return _servers[-1]


class Pair:
    """A prefill and a decode server."""

    def __init__(
        self, nodes: Sequence[Node], from_shape: Shape, to_shape: Shape, model: Model, lease: float = 30.0
    ) -> None:
        self.model = model
        self.prefill = serve(nodes[:8], "kv_producer", from_shape, model, lease)
        self.decode = serve(nodes[8:], "kv_consumer", to_shape, model, lease)

    def hand_over(self, n_tokens: int, n_local: int = 0) -> list[bool]:
        """Hand a prompt over; return which decode ranks have it. Prefill must have its blocks back."""
        seed = next(_numbers)
        random = np.random.default_rng(seed)
        request, kv = f"request-{seed}", self.model.kv(sum(self.prefill.shape.stages), n_tokens, seed)
        there, here = self.prefill.tables(n_tokens, random), self.decode.tables(n_tokens, random)
        given = self.prefill.leave(request, kv, there)
        ended: dict[int, bool] = {}
        if n_local:
            for rank in self.decode.ranks:
                rank.write(kv[:, :, :n_local], here)
        self.decode.ask(request, given, here, n_local)
        eventually(lambda: self.decode.loaded(request, ended), SETTLE_S)
        if all(ended.values()):
            found: set[tuple[int, str]] = set()
            eventually(lambda: len(self.prefill.released(found)) == len(self.prefill.ranks), SETTLE_S)
            for rank in self.decode.ranks:
                assert rank.holds(kv, here)
                assert rank.touches_only({block for table in here for block in table})
        for rank in (*self.prefill.ranks, *self.decode.ranks):
            rank.blocks[:] = 0
        return [ended[number] for number in range(len(self.decode.ranks))]


MODELS = {"8 heads": Model(8), "2 heads": Model(2), "MLA": Model(8, is_mla=True)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("from_tp", SIZES)
def test_each_decode_rank_gets_its_heads(nodes: list[Node], from_tp: int, model: Model) -> None:
    for to_tp in SIZES:
        pair = Pair(nodes, Shape(from_tp), Shape(to_tp), model)
        assert all(pair.hand_over(10)), to_tp


STAGES = [(3,), (1, 2), (2, 1), (1, 1, 1)]


@pytest.mark.parametrize("from_stages", STAGES, ids=str)
@pytest.mark.parametrize("to_stages", STAGES, ids=str)
def test_each_stage_gets_its_layers(
    nodes: list[Node], from_stages: tuple[int, ...], to_stages: tuple[int, ...]
) -> None:
    for tp in ((1, 1), (2, 1), (1, 2)):
        assert all(Pair(nodes, Shape(tp[0], from_stages), Shape(tp[1], to_stages), Model(8)).hand_over(9))


@pytest.mark.parametrize(("from_block", "to_block"), [(4, 8), (8, 4), (2, 8), (8, 2)])
def test_blocks_of_other_sizes_are_filled_from_each_other(
    nodes: list[Node], from_block: int, to_block: int
) -> None:
    for from_tp, to_tp in ((1, 1), (2, 1), (1, 4)):
        for model in (Model(4), Model(4, is_hybrid=True), Model(1, is_mla=True)):
            pair = Pair(nodes, Shape(from_tp, block=from_block), Shape(to_tp, block=to_block), model)
            for n_tokens in (1, 7, 8, 25):
                assert all(pair.hand_over(n_tokens))


def test_what_decode_has_already_is_not_taken(nodes: list[Node]) -> None:
    pair = Pair(nodes, Shape(2, block=2), Shape(1, block=4), Model(4))
    assert all(pair.hand_over(11, n_local=8))


def test_a_kernels_smaller_blocks_are_handed_over_too(nodes: list[Node]) -> None:
    for from_shape, to_shape in (
        (Shape(2, block=8, n_tiles=2), Shape(1, block=8)),
        (Shape(1, block=8, n_tiles=4), Shape(4, block=8, n_tiles=2)),
    ):
        assert all(Pair(nodes, from_shape, to_shape, Model(4)).hand_over(19))


@pytest.mark.parametrize(
    ("from_shape", "to_shape", "model", "said"),
    [
        (Shape(3), Shape(1), Model(8), "8 KV heads can't be shared among 3 ranks evenly"),
        (Shape(block=6), Shape(block=4), Model(8), "blocks hold 6 tokens there and 4 here"),
        (
            Shape(block=8, isa="amx"),
            Shape(block=4, isa="amx"),
            Model(8),
            "attention on CPUs packs each as a whole",
        ),
        (
            Shape(stages=(2,)),
            Shape(stages=(3,)),
            Model(8),
            "0 of prefill's stages have layer model.layers.2.",
        ),
        (Shape(isa="amx"), Shape(isa="vec"), Model(8), "isa is 'amx' there and 'vec' here"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(
    nodes: list[Node],
    from_shape: Shape,
    to_shape: Shape,
    model: Model,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not any(Pair(nodes, from_shape, to_shape, model, lease=0.5).hand_over(9))
    assert said in caplog.text


def test_blocks_that_only_some_ranks_take_are_free_when_the_lease_ends(nodes: list[Node]) -> None:
    pair = Pair(nodes, Shape(1), Shape(2), Model(8), lease=1.0)
    kv, random = pair.model.kv(3, 9, 1), np.random.default_rng(1)
    there, here = pair.prefill.tables(9, random), pair.decode.tables(9, random)
    given = pair.prefill.leave("request", kv, there)
    pair.decode.ranks = pair.decode.ranks[:1]
    pair.decode.ask("request", given, here)
    ended: dict[int, bool] = {}
    eventually(lambda: pair.decode.loaded("request", ended), SETTLE_S)
    assert ended == {0: True}
    assert not pair.prefill.released(set()), "the other rank may still come"
    eventually(lambda: bool(pair.prefill.released(set())), SETTLE_S)


def test_what_prefill_does_not_hear_is_said_again(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a first connection takes longer than the second that it is given, and the next one works."""
    pair = Pair(nodes, Shape(2), Shape(1), Model(8))
    put, n_lost = Transfers.put_async, 0

    def lost_at_first(self: Transfers, node_id: str, *args: Any, **kwargs: Any) -> Offer:
        nonlocal n_lost
        n_lost += 1
        return put(self, "nobody" if n_lost == 1 else node_id, *args, **kwargs)

    monkeypatch.setattr(Transfers, "put_async", lost_at_first)
    began = time.monotonic()
    assert pair.hand_over(13) == [True]
    assert n_lost > 2
    assert time.monotonic() - began < 10.0, "the load's deadline is 30 s"


def test_who_wants_something_else_never_takes_what_another_one_wants(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances of other stages ask for one hand-off; ranks of one number hold other layers in each."""
    model, random = Model(8), np.random.default_rng(1)
    prefill = serve(nodes[:8], "kv_producer", Shape(2), model)
    whole = serve(nodes[8:9], "kv_consumer", Shape(1), model)
    stages = serve(nodes[9:11], "kv_consumer", Shape(1, (1, 2)), model, deadline=3.0)
    kv = model.kv(3, 13, 1)
    here = stages.tables(13, random)
    given = prefill.leave("a request", kv, prefill.tables(13, random))
    with monkeypatch.context() as patched:
        patched.setattr(
            Loads, "_get", lambda *_: None
        )  # the first one says what it wants, and is slow to take it
        whole.ask("slow", given, whole.tables(13, random))
        left = [rank.side._leaving._left[0] for rank in prefill.ranks]
        eventually(lambda: all(each.tp_size and each.offers for each in left), SETTLE_S)
    ended: dict[int, bool] = {}
    stages.ask("quick", given, here)
    eventually(lambda: stages.loaded("quick", ended), SETTLE_S)
    for number, rank in enumerate(stages.ranks):
        assert not ended[number] or rank.holds(kv, here), f"rank {number} has others' layers"


@pytest.mark.parametrize("first", [Shape(1), Shape(2), Shape(2, (1, 2))], ids=["equal", "unequal", "stages"])
def test_a_hand_off_that_somebody_else_has_is_refused_at_once(nodes: list[Node], first: Shape) -> None:
    """The load's deadline is 30 s."""
    model, random = Model(8), np.random.default_rng(1)
    prefill = serve(nodes[:1], "kv_producer", Shape(1), model)
    kv = model.kv(3, 13, 1)
    given = prefill.leave("a request", kv, prefill.tables(13, random))
    takes = serve(nodes[1:5], "kv_consumer", first, model)
    assert _ended(takes, given, takes.tables(13, random)) == [True] * first.n_ranks
    eventually(lambda: bool(prefill.released(set())), SETTLE_S)
    for shape in (Shape(1), Shape(4), Shape(1, (1, 2))):
        late = serve(nodes[5:10], "kv_consumer", shape, model)
        with returns_within(2.0):
            assert _ended(late, given, late.tables(13, random)) == [False] * shape.n_ranks


def test_who_can_not_have_a_part_hears_so_while_another_takes_his(nodes: list[Node]) -> None:
    model, random = Model(8), np.random.default_rng(1)
    prefill = serve(nodes[:1], "kv_producer", Shape(1), model)
    kv = model.kv(3, 13, 1)
    given = prefill.leave("a request", kv, prefill.tables(13, random))
    slow, late = (serve(nodes[i : i + 4], "kv_consumer", Shape(n), model) for i, n in ((1, 2), (5, 4)))
    here, ranks = slow.tables(13, random), slow.ranks
    slow.ranks = ranks[:1]
    assert _ended(slow, given, here) == [True]
    with returns_within(2.0):
        assert _ended(late, given, late.tables(13, random)) == [False] * 4
    assert not prefill.released(set()), "the other one has not come yet"
    slow.ranks = ranks[1:]
    assert _ended(slow, given, here) == [True]
    assert all(rank.holds(kv, here) for rank in ranks)
    eventually(lambda: bool(prefill.released(set())), SETTLE_S)


def _ended(decode: Server, given: dict[str, Any], tables: list[list[int]]) -> list[bool]:
    """Load a hand-off; return which ranks have it."""
    ended: dict[int, bool] = {}
    decode.ask("a load", given, tables)
    eventually(lambda: decode.loaded("a load", ended), SETTLE_S)
    return [ended[number] for number in range(len(decode.ranks))]


def test_layers_are_spelled_in_short() -> None:
    layers = ["model.layers.10.attn", *(f"model.layers.{i}.attn" for i in range(3)), "encoder"]
    assert spell(layers) == "encoder:;model.layers.*.attn:0-2,10"
    assert sorted(names(spell(layers))) == sorted(layers)
    for odd in ("a.*:0-999999", "a.*:x", "a.*:3-x"):
        with pytest.raises(UsageError, match="can't be read"):
            names(odd)


def test_what_is_no_want_is_refused() -> None:
    want = Want(3, 1, 2, (WantedGroup(Share("layers.*:0-2", 4, 8, 8, 64), 0, 7),))
    row = want.to_row()
    assert Want.from_row(row) == want
    for damage in (b"", b"{}", b"\xff" * 40, bytes(row).replace(b'"rank":3', b'"rank":99', 1)):
        with pytest.raises(UsageError, match="not a want"):
            Want.from_row(np.frombuffer(damage, np.uint8))
