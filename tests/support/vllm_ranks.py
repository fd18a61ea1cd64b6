"""vLLM instances of several ranks without vLLM: each holds its stage's layers and its heads of a model's KV.

The KV of a prompt is a function of layer, head and token alone, whoever holds it and in blocks of whatever size, so
that what one instance has handed to another can be compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv import Node
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.integrations.vllm_connector.messages import Blocks, Leave, Pull, StepMetadata
from p2pkv.integrations.vllm_connector.scheduler import SchedulerSide
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.worker import WorkerSide
from vllm_fakes import CacheFake, FullAttentionSpec, SlidingWindowSpec, vllm_config

WIDTH, N_BLOCKS = 6, 40
WINDOW = 11

KV = NDArray[np.uint8]
"""``(layers, heads, tokens, width)``; no byte is 0."""


@dataclass(frozen=True)
class Shape:
    """How an instance shares the model."""

    tp: int = 1
    stages: tuple[int, ...] = (3,)
    """Layers of each."""
    block: int = 4
    """Tokens of a block."""
    n_tiles: int = 1
    """Of a block: a kernel may take smaller ones."""
    isa: str = ""
    """By what attention packs blocks."""

    @property
    def n_ranks(self) -> int:
        return self.tp * len(self.stages)


@dataclass(frozen=True)
class Model:
    """Every other layer has a window in a hybrid model."""

    n_heads: int = 8
    is_mla: bool = False
    is_hybrid: bool = False

    @property
    def n_kinds(self) -> int:
        return 2 if self.is_hybrid else 1

    def kv(self, n_layers: int, n_tokens: int, seed: int) -> KV:
        heads = 1 if self.is_mla else self.n_heads
        return np.random.default_rng(seed).integers(1, 256, (n_layers, heads, n_tokens, WIDTH), np.uint8)

    def heads_of(self, rank: int, tp: int) -> range:
        """As vLLM loads them: ranks in a row hold copies if there are too few."""
        if self.is_mla:
            return range(1)
        if tp >= self.n_heads:
            return range(rank // (tp // self.n_heads), rank // (tp // self.n_heads) + 1)
        return range(rank * (self.n_heads // tp), (rank + 1) * (self.n_heads // tp))


class RankFake:
    """One rank: its part of every block, and the connector's half in its worker."""

    def __init__(
        self, node: Node, role: str, shape: Shape, model: Model, rank: int, settings: dict[str, Any]
    ) -> None:
        self.shape, self.model = shape, model
        stage, tp_rank = divmod(rank, shape.tp)
        first = sum(shape.stages[:stage])
        self.layers = range(first, first + shape.stages[stage])
        self.heads = model.heads_of(tp_rank, shape.tp)
        tile = shape.block // shape.n_tiles
        self.blocks = np.zeros(
            (len(self.layers), N_BLOCKS * shape.n_tiles, len(self.heads), tile, WIDTH), np.uint8
        )
        config = vllm_config({"share_prefixes": False} | settings, role, "recompute")
        parallel, named = config.parallel_config, config.model_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = shape.tp, len(shape.stages)
        parallel.world_size, parallel.rank = shape.tp * len(shape.stages), rank
        named.use_mla, named.get_total_num_kv_heads = model.is_mla, lambda: model.n_heads
        specs: list[SimpleNamespace] = [FullAttentionSpec(block_size=shape.block)]
        if model.is_hybrid:
            specs.append(SlidingWindowSpec(block_size=shape.block, sliding_window=WINDOW))
        groups = [
            SimpleNamespace(
                kv_cache_spec=spec,
                layer_names=[name(i) for i in range(sum(shape.stages)) if self.kind(i) == kind],
            )
            for kind, spec in enumerate(specs)
        ]
        cache_config = SimpleNamespace(kv_cache_groups=groups, hash_block_size=None, num_blocks=N_BLOCKS)
        self.instance = Instance.read(config, cache_config)
        tensors = {name(i): CacheFake(self.blocks, self.blocks[k]) for k, i in enumerate(self.layers)}
        caches = KVCaches(
            tensors, groups=self.instance.groups.each, n_blocks=N_BLOCKS, current_stream=lambda device: 0
        )
        self.side = WorkerSide(self.instance, rank, shape.isa, caches, start_node=lambda config: node)

    def kind(self, layer: int) -> int:
        """The group of a layer."""
        return layer % self.model.n_kinds

    def place(self, layer: int, block_id: int, token: int) -> KV:
        """Return where a token of a block lies, all heads."""
        tile, at = divmod(token, self.shape.block // self.shape.n_tiles)
        return self.blocks[layer - self.layers.start, block_id * self.shape.n_tiles + tile, :, at]

    def write(self, kv: KV, tables: Sequence[Sequence[int]]) -> None:
        """Compute a prompt into blocks, by group."""
        for layer in self.layers:
            for token in range(kv.shape[2]):
                block_id = tables[self.kind(layer)][token // self.shape.block]
                self.place(layer, block_id, token % self.shape.block)[:] = kv[layer, self.heads, token]

    def holds(self, kv: KV, tables: Sequence[Sequence[int]], besides: Collection[int] = ()) -> bool:
        """Whether all is there that the next token looks back at, but for some blocks."""
        n_tokens = kv.shape[2]
        for layer in self.layers:
            for token in range(max(0, n_tokens - WINDOW + 1) if self.kind(layer) else 0, n_tokens):
                block_id = tables[self.kind(layer)][token // self.shape.block]
                if block_id in besides:
                    continue
                there = self.place(layer, block_id, token % self.shape.block)
                if (there != kv[layer, self.heads, token]).any():
                    return False
        return True

    def wipe(self, block_ids: Collection[int]) -> None:
        """Have blocks hold nothing."""
        self.blocks[:, self._tiles(block_ids)] = 0

    def touches_only(self, block_ids: set[int]) -> bool:
        """Whether nothing was written to other blocks."""
        return not self.blocks[:, self._tiles(set(range(N_BLOCKS)) - block_ids)].any()

    def _tiles(self, block_ids: Collection[int]) -> list[int]:
        n = self.shape.n_tiles
        return [i * n + k for i in block_ids for k in range(n)]


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


class Server:
    """An instance: its ranks, of which each has one of ``nodes``, and its scheduler's half."""

    def __init__(
        self,
        nodes: Sequence[Node],
        role: str,
        shape: Shape,
        model: Model,
        lease: float = 30.0,
        deadline: float = 30.0,
        **more: object,
    ) -> None:
        """``more``: settings of the connector."""
        self.shape, self.model = shape, model
        settings = {"load_deadline": deadline, "transfer_lease": lease, **more}
        self.ranks = [RankFake(nodes[i], role, shape, model, i, settings) for i in range(shape.n_ranks)]
        self.scheduler = SchedulerSide(self.ranks[0].instance)
        self.scheduler.connect([rank.side.describe() for rank in self.ranks])

    def end(self) -> None:
        """End the ranks' threads, and leave their nodes to others."""
        for rank in self.ranks:
            for part in (rank.side._leaving, rank.side._publishing, rank.side._loads):
                part.close()

    def tables(self, n_tokens: int, random: np.random.Generator) -> list[list[int]]:
        """Draw blocks for a prompt, by group."""
        n = -(-n_tokens // self.shape.block)
        ids = (random.permutation(N_BLOCKS - 1)[: n * self.model.n_kinds] + 1).tolist()
        return [ids[k * n : (k + 1) * n] for k in range(self.model.n_kinds)]

    def leave(self, request_id: str, kv: KV, tables: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Compute a prompt and hand it off; return the ``kv_transfer_params``."""
        handoff = self.handoff(request_id, kv.shape[2])
        for rank in self.ranks:
            rank.write(kv, tables)
            self.offer(rank, request_id, handoff, tables)
        return handoff.to_params()

    def handoff(self, request_id: str, n_tokens: int) -> Handoff:
        """Return what decode is told of a prompt."""
        request: Any = SimpleNamespace(
            kv_transfer_params={"do_remote_decode": True},
            prompt_token_ids=list(range(n_tokens)),
            status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
            num_computed_tokens=n_tokens,
            num_prompt_tokens=n_tokens,
            request_id=request_id,
            lora_request=None,
            mm_features=[],
        )
        if self.model.is_hybrid:
            self.scheduler._shortened.add(request_id)
        handoff = self.scheduler.handoff(request)
        assert handoff is not None
        return handoff

    def offer(
        self, rank: RankFake, request_id: str, handoff: Handoff, tables: Sequence[Sequence[int]]
    ) -> None:
        """Have a rank keep its part, and offer it."""
        leave = Leave(request_id, handoff.name, self.needed(handoff.n_tokens, tables))
        rank.side.before_forward(StepMetadata(leaves=[leave]))

    def needed(self, n_tokens: int, tables: Sequence[Sequence[int]], n_local: int = 0) -> tuple[Blocks, ...]:
        """Return the blocks that decode needs, of which it has ``n_local`` tokens already."""
        groups = self.ranks[0].instance.groups.each
        needed = [group.missing(n_local, n_tokens) for group in groups]
        return tuple(Blocks(g, n.start, list(tables[g][n.start : n.stop])) for g, n in enumerate(needed) if n)

    def ask(
        self, request_id: str, given: dict[str, Any], tables: Sequence[Sequence[int]], n_local: int = 0
    ) -> None:
        """Begin to load what is handed off, into blocks; ``n_local`` tokens are here already."""
        handoff = Handoff.from_params(given)
        blocks = self.needed(handoff.n_tokens, tables, n_local)
        for rank in self.ranks:
            rank.side.load(StepMetadata(pulls=[Pull(request_id, handoff, "", blocks, is_awaited=True)]))

    def loaded(self, request_id: str, ended: dict[int, bool]) -> bool:
        """Note in ``ended`` which ranks' loads have ended and whether they are right; return whether all have."""
        for number, rank in enumerate(self.ranks):
            if number not in ended:
                done = rank.side._loads.take_done()
                if request_id in done:
                    ended[number] = done[request_id] is None
        return len(ended) == len(self.ranks)

    def released(self, found: set[tuple[int, str]]) -> set[tuple[int, str]]:
        """Add to ``found`` which ranks have given which requests' blocks back."""
        for number, rank in enumerate(self.ranks):
            found |= {(number, request_id) for request_id in rank.side.take_done()[0]}
        return found
