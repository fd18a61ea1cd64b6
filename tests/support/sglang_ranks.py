"""Tensor parallel SGLang servers without SGLang: one rank a node, and what SGLang says of a model's heads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.sglang.pd.decode import DecodeSide
from p2pkv.integrations.sglang.pd.heads import Split
from p2pkv.integrations.sglang.pd.prefill import Chunk, PrefillSide
from p2pkv.integrations.sglang.pd.rooms import Incoming, Progress
from p2pkv.integrations.sglang.pd.rows import RequestRows, memories
from p2pkv.integrations.sglang.pd.stages import Place
from p2pkv.integrations.sglang.pd.wire import node_id
from sglang_manager import Manager
from sglang_servers import engine_args

LAYERS, SLOTS, PAGE_TOKENS, K_BYTES, V_BYTES = 3, 8, 4, 16, 8
"""SLOTS: pages of each rank's pool; K and V have heads of other sizes."""
SETTLE_S = 60.0

Heads = tuple[int, int]


def heads_of(rank: int, size: int, n_heads: int) -> Heads:
    """Return the heads of a rank as SGLang and vLLM load them: ranks in a row hold copies if there are too few."""
    if size >= n_heads:
        return rank // (size // n_heads), rank // (size // n_heads) + 1
    return rank * (n_heads // size), (rank + 1) * (n_heads // size)


def model_kv(n_heads: int, n_pages: int, seed: int) -> list[NDArray[np.uint8]]:
    """Return the whole KV of a prompt: K of each layer, then V; ``(pages, tokens, heads, bytes)``."""
    random = np.random.default_rng(seed)
    widths = [K_BYTES] * LAYERS + [V_BYTES] * LAYERS
    return [random.integers(1, 256, (n_pages, PAGE_TOKENS, n_heads, w), np.uint8) for w in widths]


class Rank:
    """One rank of a server of ``size`` of them, with some of the layers: all of them unless they are named."""

    def __init__(
        self,
        node: Node,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        size: int,
        n_heads: int,
        layers: range = range(LAYERS),
    ) -> None:
        self.node, self.rank, self.size, self.layers = node, rank, size, layers
        self.heads = heads_of(rank, size, n_heads)
        n_here = self.heads[1] - self.heads[0]
        widths = [K_BYTES] * len(layers) + [V_BYTES] * len(layers)
        self.buffers = [np.zeros((SLOTS, PAGE_TOKENS, n_here, width), np.uint8) for width in widths]
        self.aux = np.zeros((4, 64), np.uint8)
        self.args: Any = engine_args(
            [buffer.ctypes.data for buffer in self.buffers],
            [buffer.nbytes for buffer in self.buffers],
            [buffer[0].nbytes for buffer in self.buffers],
            self.aux,
            kv_head_num=n_here,
            total_kv_head_num=n_heads,
            page_size=PAGE_TOKENS,
        )
        self.manager = Manager(self.args, context)
        self.mail_port = self.manager.rank_port
        self.manager.rank_port = int(node.node_id.rpartition(":")[2])  # several servers share a node here
        self.rows = RequestRows.of(self.args)
        self.split = Split.of(self.args, size, rank, is_mla=False)
        self.boundary = Boundary("a test", node.metrics)

    def own(self, kv: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """Return what this rank's buffers have of the whole model's."""
        of_layers = [kv[kind * LAYERS + layer] for kind in range(2) for layer in self.layers]
        return [whole[:, :, self.heads[0] : self.heads[1]] for whole in of_layers]


class PrefillRank(Rank):
    """A rank that offers, of some stage."""

    def __init__(self, *given: Any, stage: int = 0, stages: Sequence[range] = (range(LAYERS),)) -> None:
        super().__init__(*given, stages[stage])
        for address, nbytes in memories(self.args):
            self.node.register_address(address, nbytes, readable=True)
        place = Place(stage, len(stages), stages[stage].start)
        self.side = PrefillSide(
            self.manager, self.rows, self.boundary, self.node.transfers, self.split, place
        )
        self._to = self.manager.server_socket.context.socket(zmq.PUSH)
        self._to.connect(f"tcp://127.0.0.1:{self.mail_port}")

    def begin(self, room: int, kv: list[NDArray[np.uint8]], slots: NDArray[np.int32]) -> None:
        """Compute a prompt's KV into some slots."""
        self.manager.update_status(room, 1)
        self.side.open(room)
        for buffer, whole in zip(self.buffers, self.own(kv), strict=True):
            buffer[slots] = whole
        self.aux[1] = (room + self.layers.stop) % 251  # what the last stage says of a request is what counts

    def hear(self, message: list[bytes]) -> None:
        self._to.send_multipart(message)

    def send(self, room: int, slots: NDArray[np.int32]) -> None:
        """Offer it, in two chunks."""
        eventually(lambda: self.manager.request_status[room] >= 2, SETTLE_S)
        half = len(slots) // 2
        self.side.send(room, Chunk(slots[:half], 0, False, None, None, ()))
        self.side.send(room, Chunk(slots[half:], half, True, 1, None, ()))

    def is_done(self, room: int) -> bool:
        return self.side.progress(room)[0] is Progress.DONE or self.manager.request_status[room] == 4

    def close(self) -> None:
        self._to.close(linger=0)
        self.side.stop()
        self.manager.close()


class DecodeRank(Rank):
    """A rank that takes."""

    def __init__(self, *given: Any, stages: Sequence[range] = ()) -> None:
        """``stages``: the layers of each of prefill's, as this rank counts them."""
        super().__init__(*given)
        for address, nbytes in memories(self.args):
            self.node.register_address(address, nbytes)
        self.side = DecodeSide(
            self.manager,
            self.rows,
            self.boundary,
            self.node.transfers.grant,
            self._members,
            self.split,
            lambda *_: tuple(len(layers) for layers in stages),
        )

    def _members(self) -> dict[str, int]:
        return {m.node_id: m.boot_epoch for m in self.node.members()}

    def sources(self, prefill: list[PrefillRank]) -> tuple[list[PrefillRank], int]:
        """Return the prefill ranks that SGLang has this one ask, and how many ask each of them."""
        size = len(prefill)
        if size <= self.size:
            return [prefill[self.rank // (self.size // size)]], self.size // size
        each = size // self.size
        return prefill[self.rank * each : (self.rank + 1) * each], 1

    def ask(
        self, room: int, prefill: list[PrefillRank], slots: NDArray[np.int32], n_stages: int = 1
    ) -> Incoming:
        """Grant some slots to a request, and have prefill told of it: its ranks, those of a stage after another's."""
        self.manager.update_status(room, 1)
        for buffer in self.buffers:
            buffer[:] = 0
        self.aux[:] = 0
        size = len(prefill) // n_stages
        of_stages = [self.sources(prefill[stage * size : (stage + 1) * size]) for stage in range(n_stages)]
        sources = [source for ranks, _ in of_stages for source in ranks]
        n_peers = of_stages[0][1]
        infos = [
            {"rank_ip": "127.0.0.1", "rank_port": source.manager.rank_port, "is_dummy": False}
            for source in sources
        ]
        info = SimpleNamespace(attn_tp_size=size, pp_size=n_stages)
        receiver: Any = SimpleNamespace(
            bootstrap_addr="a", bootstrap_room=room, bootstrap_infos=infos, prefill_info=info
        )
        assert self.side.unequal(info) is None  # type: ignore[arg-type]
        incoming = self.side.grant(receiver, slots, 0, None)
        message = self.side.wanted(room, slots, None, 0, n_peers, is_dummy=False)
        for source in sources:
            source.hear(message)
        return incoming

    def close(self) -> None:
        self.side.stop()
        self.manager.close()


def hand_over(
    prefill: list[PrefillRank],
    decode: list[DecodeRank],
    room: int,
    kv: list[NDArray[np.uint8]],
    *,
    seed: int,
    n_stages: int = 1,
) -> None:
    """Hand a prompt's KV over, between slots that ``seed`` says: each decode rank then has its part and no more."""
    random, n_pages = np.random.default_rng(seed), len(kv[0])
    there, here = (random.permutation(SLOTS)[:n_pages].astype(np.int32) for _ in range(2))
    for source in prefill:
        source.begin(room, kv, there)
    incoming = [rank.ask(room, prefill, here, n_stages) for rank in decode]
    for source in prefill:
        source.send(room, there)
    for rank, one in zip(decode, incoming, strict=True):
        eventually(lambda one=one: one.progress() is not Progress.PENDING, SETTLE_S)  # type: ignore[misc]
        assert one.progress() is Progress.DONE, one.failure
        for buffer, whole in zip(rank.buffers, rank.own(kv), strict=True):
            assert np.array_equal(buffer[here], whole)
            assert not buffer[np.setdiff1d(np.arange(SLOTS), here)].any()
        assert (rank.aux[0] == prefill[-1].aux[1]).all()
    for source in prefill:
        eventually(lambda source=source: source.is_done(room), SETTLE_S)  # type: ignore[misc]


def start_nodes(n: int, join: str) -> list[Node]:
    """Start as many nodes as a server has ranks, named as SGLang's ranks are."""
    settings: Any = {"join": [join], "pool_size": 0, "buffer_size": 0}
    return [Node.start(Config(node_id=node_id("127.0.0.1", 1 + i), **settings)) for i in range(n)]
