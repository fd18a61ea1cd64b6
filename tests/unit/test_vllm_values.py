"""What vLLM's connector makes of its settings, hands over and counts, without any node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pkv.errors import ConfigError, UsageError
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.groups import Kind, read_groups
from p2pkv.integrations.vllm_connector.handoff import OFFER_NBYTES, Handoff, Rank, offers
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.shares import Share, Split, spell
from p2pkv.integrations.vllm_connector.stats import Tally
from vllm_fakes import (
    LAYERS,
    SHAPE,
    SPECS,
    CacheFake,
    ModelConfigFake,
    SlidingWindowSpec,
    caches,
    kv_cache_config,
    looked_at,
    vllm_config,
)


def test_a_model_that_can_not_be_served_stops_vllm_at_start() -> None:
    config = vllm_config({}, "kv_both", "recompute")
    with pytest.raises(ConfigError, match="nothing to hand off"):
        P2PKVConnector(config, None, kv_cache_config(n_groups=0, kinds=()))
    connector = P2PKVConnector(config, None, kv_cache_config())
    with pytest.raises(ConfigError, match="CUDA devices only"):
        connector.register_kv_caches(caches(np.zeros((LAYERS, 8, *SHAPE), np.float32), device="xpu"))
    here, there = (caches(np.zeros((LAYERS, 8, *SHAPE), np.float32), device) for device in ("cpu", "cuda"))
    with pytest.raises(ConfigError, match="one device a rank"):
        connector.register_kv_caches({"here": here["layers.0"], "there": there["layers.1"]})
    with pytest.raises(ConfigError, match="12 blocks, which is no multiple of vLLM's 8"):
        connector.register_kv_caches(caches(np.zeros((LAYERS, 12, *SHAPE), np.float32)))
    scattered = np.zeros((LAYERS, 2, 8, *SHAPE[1:]), np.float32).swapaxes(1, 2)  # K and V apart
    with pytest.raises(ConfigError, match="not contiguous"):
        connector.register_kv_caches(caches(scattered))


class SlidingWindowMLASpec(SlidingWindowSpec):
    """One that vLLM derives from a window, and that keeps something else."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """How vLLM wraps layers of different sizes."""


def of_one_group(spec: SimpleNamespace, **fields: object) -> SimpleNamespace:
    given = kv_cache_config()
    given.kv_cache_groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"], **fields)]
    return given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (of_one_group(SlidingWindowMLASpec(block_size=4)), "group 0 are of SlidingWindowMLASpec"),
        (
            of_one_group(
                UniformTypeKVCacheSpecs(
                    block_size=4, kv_cache_specs={"a": SPECS["full"], "b": SPECS["window"]}
                )
            ),
            "keep different blocks",
        ),
        (of_one_group(SPECS["full"], host_resident=True), "not all in the memory"),
        (of_one_group(SPECS["full"], enable_kv_transfer=False), "not all in the memory"),
    ],
)
def test_layers_of_which_it_is_not_known_what_they_keep_stop_vllm_at_start(
    given: SimpleNamespace, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Instance.read(vllm_config({}, "kv_both", "recompute"), given)


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_stops_vllm_at_start(name: str) -> None:
    config = vllm_config({}, "kv_both", "recompute")
    setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"{name} is 2; p2pkv knows whole blocks only, set it to 1"):
        Instance.read(config, kv_cache_config())


def test_layers_of_several_sizes_and_one_kind_are_one_group() -> None:
    spec = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": SPECS["full"], "b": SPECS["full"]})
    (group,) = Instance.read(vllm_config({}, "kv_both", "recompute"), of_one_group(spec)).groups.each
    assert (group.kind, group.layers) == (Kind.FULL, ("a", "b"))


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        # blocks of four tokens, needed after 0, 4, 5, 8, 9, 13 tokens
        ("full", ["", "0", "01", "01", "012", "0123"]),
        ("window", ["", "0", "01", "01", "12", "23"]),
        ("chunk", ["", "0", "01", "", "2", "23"]),
        ("state", ["", "0", "0", "0", "0", "0"]),
    ],
)
def test_what_tokens_to_come_need(kind: str, needed: list[str]) -> None:
    (group,) = read_groups(kv_cache_config(kinds=(kind,))).each
    assert ["".join(map(str, group.needed(n))) for n in (0, 4, 5, 8, 9, 13)] == needed
    assert all(list(group.needed(n)) == list(looked_at(SPECS[kind], n)) for n in range(50))


@pytest.mark.parametrize("n_parts", [1, 2, 4])
@pytest.mark.parametrize("layers_within", [False, True])
def test_a_block_is_all_of_the_kernels_smaller_ones(n_parts: int, layers_within: bool) -> None:
    """A kernel's tensor counts its own blocks; vLLM's ids count vLLM's."""
    n_blocks = 8
    shape = (SHAPE[0], SHAPE[1] // n_parts, SHAPE[2])
    if layers_within:  # the layers of a block lie side by side
        storage = np.zeros((n_blocks * n_parts, LAYERS, *shape), np.float32)
        tensors = {f"layers.{i}": CacheFake(storage, storage[:, i]) for i in range(LAYERS)}
    else:
        storage = np.zeros((LAYERS, n_blocks * n_parts, *shape), np.float32)
        tensors = caches(storage)
    groups = read_groups(kv_cache_config(n_blocks=n_blocks)).each
    (found,) = KVCaches(tensors, groups=groups, n_blocks=n_blocks, current_stream=lambda device: 0).groups
    assert found is not None
    for address, nbytes in found.rows([3, 6], range(found.n_rows)).tolist():
        first = (address - storage.ctypes.data) // storage.itemsize
        storage.reshape(-1)[first : first + nbytes // storage.itemsize] += 1
    of_kernel = np.zeros(n_blocks * n_parts)
    for block in (3, 6):
        of_kernel[block * n_parts : (block + 1) * n_parts] = 1
    for tensor in tensors.values():
        assert (tensor.array == of_kernel[:, None, None, None]).all()
    assert found.block_nbytes == storage.nbytes // n_blocks
    with pytest.raises(IndexError):
        found.rows([n_blocks], range(1))
    assert found.layers_of(range(found.n_rows)) == set(tensors)


@pytest.mark.parametrize("n_blocks", [0, 1, 7, 500, 40000])
@pytest.mark.parametrize("row_nbytes", [[32 << 10] * 48, [1 << 30, 1, 1 << 23], [8] * 40000])
def test_offers_of_a_hand_off_have_every_row_of_every_block_once(
    n_blocks: int, row_nbytes: list[int]
) -> None:
    seen = np.zeros((len(row_nbytes), min(n_blocks, 600)), np.uint8)
    n_rows = 0
    names = []
    for part in offers("name", 0, n_blocks, row_nbytes):
        names.append(part.name)
        seen[part.rows.start : part.rows.stop] += 1
        n_rows += len(part.rows) * n_blocks
        nbytes = sum(row_nbytes[part.rows.start : part.rows.stop]) * n_blocks
        assert len(part.rows) == 1 or nbytes <= OFFER_NBYTES
    assert (seen == 1).all()
    assert n_rows == n_blocks * len(row_nbytes)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "4f3c1e"},
        {"hf_config": ModelConfigFake(rope_parameters={"rope_theta": 10000.0, "factor": 4.0})},
        {"hf_config": ModelConfigFake(text_config={"rope_parameters": None})},
        {"served_model_name": "other"},
        {"dtype": "bfloat16"},
    ],
)
def test_models_of_one_name_that_are_told_apart(changes: dict[str, Any]) -> None:
    config, other = (vllm_config({}, "kv_both", "recompute") for _ in range(2))
    vars(other.model_config).update(changes)
    assert (
        Instance.read(config, kv_cache_config()).identity != Instance.read(other, kv_cache_config()).identity
    )


def test_the_same_model_may_lie_elsewhere_and_be_read_by_another_version() -> None:
    def identity(**fields: Any) -> Mapping[str, str]:
        config = vllm_config({}, "kv_both", "recompute")
        config.model_config.hf_config = ModelConfigFake(text_config={"dtype": np.float32, **fields}, **fields)
        return Instance.read(config, kv_cache_config()).identity

    assert identity(_name_or_path="/a", transformers_version="5.1") == identity(_name_or_path="/b")


def test_every_process_of_an_instance_is_a_node_of_its_own() -> None:
    settings = {"node_id": "a", "listen": "127.0.0.1:7000", "metrics_port": 9000, "pool_size": "1MiB"}
    config = vllm_config(settings, "kv_both", "recompute")
    config.parallel_config.world_size = 2
    config.parallel_config.data_parallel_index = 1
    instance = Instance.read(config, kv_cache_config())
    nodes = [instance.worker_config(0, "n"), instance.worker_config(1, "n"), instance.scheduler_config("n")]
    assert [node.node_id for node in nodes] == ["a-3", "a-4", "a-5"]
    assert [node.listen for node in nodes] == [f"127.0.0.1:{7003 + i}" for i in range(3)]
    assert [node.metrics_port for node in nodes] == [9003, 9004, 9005]

    config.kv_transfer_config.kv_connector_extra_config["attach"] = (
        "unix:/x"  # each worker may have two nodes then
    )
    instance = Instance.read(config, kv_cache_config())
    nodes = [instance.worker_config(0, "n"), instance.worker_config(1, "n"), instance.scheduler_config("n")]
    assert [node.metrics_port for node in nodes] == [9006, 9008, 9010]


def test_a_handoff_survives_the_way_through_a_router() -> None:
    rank = Rank("node", 2**62 + 1, "3 layers", (Share(spell(["layers.0", "layers.1"]), 2, 4, 8, 64),))
    sent = Handoff("name", (rank,), Split(2, 4), 7, "0" * 32, {"block_size": "32"})
    assert Handoff.from_params(json.loads(json.dumps(sent.to_params()))) == sent


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_tokens": float("inf")},
        {"name": "\ud800"},
        {"ranks": [["node", float("-inf"), "3 layers", []]]},
        {"ranks": [["\udc00", "1", "3 layers", []]]},
    ],
)
def test_a_handoff_of_impossible_numbers_and_names_is_refused(wrong: dict[str, Any]) -> None:
    rank = Rank("node", 1, "3 layers", (Share(spell(["layers.0"]), 2, 4, 8, 64),))
    params = Handoff("name", (rank,), Split(2, 4), 7, "0" * 32, {}).to_params()
    params["p2pkv"] |= wrong
    with pytest.raises(UsageError, match="malformed"):
        Handoff.from_params(json.loads(json.dumps(params)))


def test_counts_of_several_steps_and_ranks_add_up() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.count("handoffs_loaded", 2)
    tally.took(0.5)
    first = tally.take()
    tally.count("handoffs_loaded")
    tally.count("handoffs_failed")
    tally.took(1.5)
    second = tally.take()
    assert first is not None
    assert second is not None
    total = P2PKVConnector.build_kv_connector_stats(first.data).aggregate(second)
    assert total.reduce() == {"handoffs_loaded": 3, "handoffs_failed": 1, "handoff_seconds_mean": 1.0}
