"""Pipeline stages of unequal length: each rank has layers of its own, and hands over and shares its part of a block."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.integrations.vllm_connector.messages import (
    Blocks,
    Fetch,
    Leave,
    Pages,
    Publish,
    Pull,
    StepMetadata,
)
from p2pkv.integrations.vllm_connector.weights import Weights, named
from p2pkv.testing.ports import free_port
from vllm_fakes import SHAPE, caches, kv_cache_config, prefix_hash, vllm_config

LAYERS = (3, 2)


class Pipelined:
    """An instance of two ranks, of which the first has three layers and the second two."""

    def __init__(self, name: str, join: str, role: str, layers: tuple[int, int]) -> None:
        settings = {"node_id": name, "join": [join], "pool_size": "1MiB", "load_deadline": 10.0}
        config = vllm_config(settings, role, "recompute")
        config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = 2
        self.blocks, self.workers = [], []
        for rank, n in enumerate(layers):
            config.parallel_config.rank = rank
            self.blocks.append(np.zeros((n, 16, *SHAPE), "float32"))
            self.workers.append(P2PKVConnector(config, None, kv_cache_config(n_blocks=16)))
            first = sum(layers[:rank])
            self.workers[-1].register_kv_caches(
                {f"layers.{first + i}": cache for i, cache in enumerate(caches(self.blocks[-1]).values())}
            )
        self.scheduler = P2PKVConnector(config, None, kv_cache_config(), weights=Weights())
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(rank, 0): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )

    @property
    def nodes(self) -> list[Any]:
        return [worker.node for worker in self.workers]

    def load(self, what: StepMetadata) -> list[set[int]]:
        """Return the blocks that failed, by rank."""
        failed = []
        for worker in self.workers:
            side = worker._worker
            assert side is not None
            side.load(what)
            ended: set[str] = set()
            eventually(lambda side=side, ended=ended: bool(ended.update(side.take_done()[1]) or ended), 30.0)  # type: ignore[misc]
            failed.append(side.take_failed_blocks())
        return failed

    def close(self) -> None:
        for connector in (self.scheduler, *self.workers):
            connector.shutdown()


@pytest.fixture
def join() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def pair(join: str) -> Iterator[tuple[Pipelined, Pipelined]]:
    prefill = Pipelined("prefill", join, "kv_producer", LAYERS)
    decode = Pipelined("decode", join, "kv_consumer", LAYERS)
    n_nodes = 5  # decode's scheduler asks for prefixes
    eventually(lambda: all(len(node.members()) == n_nodes for node in prefill.nodes), 20.0)
    rng = np.random.default_rng(1)
    for blocks in prefill.blocks:
        blocks[:] = rng.standard_normal(blocks.shape)
    yield prefill, decode
    prefill.close()
    decode.close()


def handed_off(prefill: Pipelined) -> Any:
    request = SimpleNamespace(
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=list(range(8)),
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        num_computed_tokens=8,
        num_prompt_tokens=8,
        request_id="request",
        lora_request=None,
        mm_features=[],
    )
    handoff = prefill.scheduler._scheduler.handoff(request)
    assert handoff is not None
    for worker in prefill.workers:
        worker.handle_preemptions(
            StepMetadata(leaves=[Leave("request", handoff.name, (Blocks(0, 0, [0, 1]),))])
        )
    return handoff


def test_each_rank_loads_its_layers_from_the_rank_that_has_them(pair: tuple[Pipelined, Pipelined]) -> None:
    prefill, decode = pair
    handoff = handed_off(prefill)
    assert decode.load(
        StepMetadata(pulls=[Pull("request", handoff, "", (Blocks(0, 0, [3, 4]),), is_awaited=True)])
    ) == [set(), set()]
    for ours, theirs in zip(prefill.blocks, decode.blocks, strict=True):
        assert (theirs[:, [3, 4]] == ours[:, [0, 1]]).all()


def test_prefixes_are_found_part_by_part(pair: tuple[Pipelined, Pipelined]) -> None:
    prefill, decode = pair
    lookups = decode.scheduler._scheduler._lookups
    assert lookups is not None
    hashes = named(b"", [prefix_hash([1]), prefix_hash([1, 2])])
    for rank, worker in enumerate(prefill.workers):
        worker._step = StepMetadata(publishes=[Publish(1, (Pages(0, hashes, [5, 6]),), "a request")])
        worker.wait_for_save()
        eventually(lambda worker=worker: worker.node.counters().get("p2pkv_pool_pages") == 2, 30.0)  # type: ignore[misc]
        if rank == 0:
            assert lookups._ask(hashes, 0, 8, 9).n_tokens == 0, "every rank's part or none"
    # the directory hears after the pool has it
    eventually(lambda: lookups._ask(hashes, 0, 8, 9).n_tokens == 8, 30.0)
    hits = lookups._ask(hashes, 0, 8, 9).hits
    assert hits is not None
    assert (len(hits), hits.page_tokens, hits.first_token, hits.n_tokens) == (2, 4, 0, 9)
    assert [source.is_on_disk for source in hits.used()] == [False], "all of the first rank's node"
    assert decode.load(StepMetadata(fetches=[Fetch("request", (Pages(0, hashes, [8, 9]),))])) == [
        set(),
        set(),
    ]
    for ours, theirs in zip(prefill.blocks, decode.blocks, strict=True):
        assert (theirs[:, [8, 9]] == ours[:, [5, 6]]).all()


def test_stages_of_other_lengths_take_their_layers_from_those_that_have_them(join: str) -> None:
    prefill, decode = (
        Pipelined("prefill", join, "kv_producer", LAYERS),
        Pipelined("decode", join, "kv_consumer", LAYERS[::-1]),
    )
    try:
        eventually(lambda: all(len(node.members()) == 5 for node in prefill.nodes), 20.0)
        rng = np.random.default_rng(1)
        for blocks in prefill.blocks:
            blocks[:] = rng.standard_normal(blocks.shape)
        pull = Pull("request", handed_off(prefill), "", (Blocks(0, 0, [3, 4]),), is_awaited=True)
        assert decode.load(StepMetadata(pulls=[pull])) == [set(), set()]
        ours, theirs = (np.concatenate(each.blocks) for each in (prefill, decode))
        assert (theirs[:, [3, 4]] == ours[:, [0, 1]]).all()
    finally:
        prefill.close()
        decode.close()


def test_who_never_publishes_has_no_pool(pair: tuple[Pipelined, Pipelined]) -> None:
    prefill, decode = pair
    assert [node.counters()["p2pkv_pool_capacity_bytes"] for node in prefill.nodes] == [1 << 20] * 2
    assert all(node.counters()["p2pkv_pool_capacity_bytes"] <= 1 << 16 for node in decode.nodes)
