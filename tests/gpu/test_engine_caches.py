"""Caches as engines lay them out on GPUs: heads or tokens outermost, layers within blocks, MLA, one byte an element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from p2pkv import ConfigError
from p2pkv.integrations.vllm import P2PKVConnector
from p2pkv.integrations.vllm_connector.caches import GroupCaches
from p2pkv.integrations.vllm_connector.tiles import Tiles
from vllm_fakes import BLOCK, LAYERS, SHAPE, CacheFake, kv_cache_config, vllm_config
from vllm_on_devices import OpenEngine, hand_off, load, share_prefix, tokens


@dataclass(frozen=True)
class Layout:
    """vLLM's name of it is the order of layers, blocks, heads, tokens (N) and content."""

    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    shape: tuple[int, int, int] = SHAPE
    dtype: str = "float32"

    @property
    def options(self) -> dict[str, Any]:
        return {"order": self.order, "shape": self.shape, "dtype": self.dtype}


TOKENS_OUTERMOST = (0, 1, 3, 2, 4)
LAYOUTS = {
    "HND": Layout(),
    "NHD": Layout(TOKENS_OUTERMOST),
    "BLHNC": Layout((1, 0, 2, 3, 4)),
    "BLNHC": Layout((1, 0, 3, 2, 4)),
    "MLA": Layout(TOKENS_OUTERMOST, (1, BLOCK, 36)),
    "FP8": Layout(TOKENS_OUTERMOST, dtype="int8"),
}
APART = {"LHBNC": (0, 2, 1, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}
"""Layouts in which a block's heads don't lie together."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_are_handed_off_in_every_layout(open_engine: OpenEngine, layout: Layout) -> None:
    prefill = open_engine("kv_producer", engine=layout.options)
    decode = open_engine("kv_consumer", engine=layout.options)
    n = 7 * BLOCK + 1
    request = load(decode, tokens(n), hand_off(prefill, tokens(n)))
    assert request.loaded_tokens == n
    assert decode.is_right(request)
    assert decode.counts["handoffs_loaded"] == 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_prefixes_are_shared_in_every_layout(open_engine: OpenEngine, layout: Layout) -> None:
    first, second = (open_engine("kv_both", engine=layout.options) for _ in range(2))
    assert second.is_right(share_prefix(first, second, 3), 3)


def test_layouts_that_differ_share_nothing(open_engine: OpenEngine) -> None:
    prefill = open_engine("kv_producer", engine=LAYOUTS["NHD"].options)
    decode = open_engine("kv_consumer", engine=LAYOUTS["HND"].options)
    prompt = tokens(2 * BLOCK)
    decode.run(decode.submit(prompt, hand_off(prefill, prompt)))
    assert decode.counts["handoffs_failed"] == 1
    assert decode.wrong == []


def _caches(make: Callable[[int], Any], order: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Return the caches of all layers, in one array of ``make`` that is permuted as vLLM does it."""
    whole = (LAYERS, 8, *SHAPE)
    storage = make(int(np.prod(whole))).reshape([whole[dimension] for dimension in order])
    permute = storage.transpose if isinstance(storage, np.ndarray) else storage.permute
    blocks = permute(*np.argsort(order).tolist())
    return [(f"layers.{i}", blocks[i]) for i in range(LAYERS)]


def _of_numpy(order: tuple[int, ...]) -> list[tuple[str, Any]]:
    found = _caches(lambda n: np.arange(n, dtype=np.float32), order)
    storage = found[0][1].base
    return [(name, CacheFake(storage, array)) for name, array in found]


def test_torch_tensors_are_found_where_numpys_are() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for layout in LAYOUTS.values():
        tensors = _caches(lambda n: torch.arange(n, dtype=torch.float32), layout.order)
        found = []
        for caches in (tensors, _of_numpy(layout.order)):
            rows = GroupCaches(caches, 8).rows([2, 5], range(LAYERS))
            rows[:, 0] -= min(cache.untyped_storage().data_ptr() for _, cache in caches)
            found.append(rows.tolist())
        assert found[0] == found[1]


def test_heads_can_be_told_apart_only_where_they_are_outermost() -> None:
    assert isinstance(Tiles.of(_of_numpy(LAYOUTS["BLHNC"].order), 8), Tiles)
    says = Tiles.of(_of_numpy(LAYOUTS["NHD"].order), 8)
    assert isinstance(says, str)
    assert "VLLM_KV_CACHE_LAYOUT=HND" in says


@pytest.mark.parametrize("order", APART.values(), ids=APART)
def test_blocks_in_pieces_are_refused_in_words(order: tuple[int, ...]) -> None:
    config = kv_cache_config()
    connector = P2PKVConnector(vllm_config({}, "kv_both", "recompute"), None, config)
    with pytest.raises(ConfigError, match=r"not contiguous.*VLLM_KV_CACHE_LAYOUT=HND"):
        connector.register_kv_caches(dict(_of_numpy(order)))


def test_vllm_is_asked_for_heads_outermost_unless_there_are_none() -> None:
    config = vllm_config({}, "kv_both", "recompute")
    assert P2PKVConnector.get_required_kvcache_layout(config) == "HND"
    config.model_config.use_mla = True
    assert P2PKVConnector.get_required_kvcache_layout(config) is None
