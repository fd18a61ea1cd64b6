"""SGLang's prefill in pipeline stages, decode without: every layer and head of every token, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from cluster import eventually
from p2pkv import UsageError
from p2pkv.integrations.sglang.pd.rows import Shape
from p2pkv.integrations.sglang.pd.stages import Place, difference
from p2pkv.testing.ports import free_port
from sglang_ranks import SETTLE_S, DecodeRank, PrefillRank, hand_over, model_kv, start_nodes

N_HEADS, N_PAGES = 4, 5
STAGES = {
    "1 and 2": (range(1), range(1, 3)),
    "2 and 1": (range(2), range(2, 3)),
    "1 each": (range(1), range(1, 2), range(2, 3)),
}


class Servers:
    """Prefill in stages of ``from_size`` ranks each, and decode of ``to_size`` ranks that counts ``counted``."""

    def __init__(
        self, stages: Sequence[range], from_size: int, to_size: int, counted: Sequence[range] | None = None
    ) -> None:
        n_prefill = len(stages) * from_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.nodes = start_nodes(n_prefill + to_size, f"127.0.0.1:{free_port()}")
        self.prefill = [
            PrefillRank(
                self.nodes[stage * from_size + rank],
                self._context,
                rank,
                from_size,
                N_HEADS,
                stage=stage,
                stages=stages,
            )
            for stage in range(len(stages))
            for rank in range(from_size)
        ]
        self.decode = [
            DecodeRank(
                self.nodes[n_prefill + rank],
                self._context,
                rank,
                to_size,
                N_HEADS,
                stages=stages if counted is None else counted,
            )
            for rank in range(to_size)
        ]
        eventually(lambda: all(len(node.members()) == len(self.nodes) for node in self.nodes), SETTLE_S)

    def close(self) -> None:
        for rank in (*self.prefill, *self.decode):
            rank.close()
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.close(), self.nodes))
        self._context.term()


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Servers] = []

    def start_one(*given: Any) -> Servers:
        started.append(Servers(*given))
        return started[-1]

    yield start_one
    for servers in started:
        servers.close()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_decode_has_the_layers_of_all_stages(
    start: Any, stages: Sequence[range], sizes: tuple[int, int]
) -> None:
    servers = start(stages, *sizes)
    room = 7
    kv = model_kv(N_HEADS, N_PAGES, seed=sum(sizes) * len(stages))
    hand_over(servers.prefill, servers.decode, room, kv, seed=len(stages), n_stages=len(stages))


def test_stages_that_decode_counts_otherwise_fail_the_request_on_both_sides(start: Any) -> None:
    servers = start(STAGES["1 and 2"], 1, 1, STAGES["2 and 1"])
    for source in servers.prefill:
        source.begin(7, model_kv(N_HEADS, N_PAGES, 1), np.arange(N_PAGES, dtype=np.int32))
    servers.decode[0].ask(7, servers.prefill, np.arange(N_PAGES, dtype=np.int32), 2)
    for stage, source in enumerate(servers.prefill):
        eventually(lambda source=source: source.manager.told[7], SETTLE_S)
        said = str(source.manager.told[7])
        assert f"prefill's stage {stage} has {stage + 1} layers from layer {stage} on" in said
        assert "SGLANG_PP_LAYER_PARTITION must be the same" in said
    assert not any(buffer.any() for buffer in servers.decode[0].buffers)


SIX = Shape((64,) * 6, (), (64,), "a model")


@pytest.mark.parametrize(
    ("place", "n_buffers", "layers", "shape", "said"),
    [
        (Place(), 6, (), SIX, None),
        (Place(1, 2, 2), 2, (2, 1), SIX, None),
        (Place(1, 2, 2), 1, (2, 1), Shape((64,) * 3, (), (64,), "MLA"), None),
        (Place(1, 2, 2), 2, (), SIX, "prefill has 2 pipeline stages, and decode counts 1"),
        (Place(), 6, (2, 1), SIX, "prefill has 1 pipeline stages, and decode counts 2"),
        (Place(1, 2, 2), 2, (2, 2), SIX, "are not K and V of 4 layers"),
        (Place(1, 2, 1), 4, (2, 1), SIX, "has 2 layers from layer 1 on, and decode counts 1 from layer 2 on"),
        (Place(1, 3, 2), 2, (1, 1, 1), SIX, "has 1 layers from layer 2 on, and decode counts 1 from layer 1"),
        (Place(0, 2, 0), 4, (1 << 80, 1), SIX, "are not K and V"),
    ],
)
def test_what_stages_can_not_send_is_said(
    place: Place, n_buffers: int, layers: Sequence[int], shape: Shape, said: str | None
) -> None:
    reason = difference(place, n_buffers, layers, shape)
    assert (reason is None) == (said is None), reason
    assert said is None or said in str(reason)


def test_decode_says_at_once_that_it_can_not_count_the_layers(start: Any) -> None:
    (decode,) = start(STAGES["1 and 2"], 1, 1).decode

    def refuse(*_: int) -> tuple[int, ...]:
        raise UsageError("SGLANG_PP_LAYER_PARTITION has three parts")

    decode.side._stage_layers = refuse
    assert "three parts" in str(decode.side.unequal(SimpleNamespace(attn_tp_size=1, pp_size=2)))


@pytest.mark.parametrize(
    ("stages", "states", "said"),
    [((range(3), range(3, 3)), (), "too few"), ((range(1), range(1, 3)), (("mamba", (8,)),), "states can't")],
)
def test_decode_says_at_once_what_it_can_not_take(
    start: Any, stages: Sequence[range], states: Any, said: str
) -> None:
    (decode,) = start(STAGES["1 and 2"], 1, 1, stages).decode
    decode.side._shape = Shape(decode.side._shape.pages, states, (64,), "a model")
    assert said in str(decode.side.unequal(SimpleNamespace(attn_tp_size=1, pp_size=2)))
