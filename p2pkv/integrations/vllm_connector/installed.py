"""The one place that looks for vLLM. Where it isn't installed, stand-ins do as well, which is how the fast tests run.

vLLM finds out by ``isinstance`` what a connector hands it, so the values that cross over have its classes as bases.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from p2pkv.integrations import engine

__all__ = [
    "HIT_SOURCE",
    "ConnectorBase",
    "ConnectorMetadata",
    "HandshakeMetadata",
    "PromMetricsBase",
    "StatsBase",
    "SupportsHMA",
    "WorkerMetadata",
    "attention_isa",
    "blocks_removed",
    "blocks_stored",
    "extra_keys",
    "metric_per_engine",
    "transfer_results",
    "version",
]

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


_find = functools.partial(engine.find, is_needed=True)


class _Plain:
    """Takes what vLLM's bases take."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        data = kwargs.get("data")
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}


class _Marker:
    """Says of a class what vLLM asks by ``isinstance``."""


if TYPE_CHECKING:
    ConnectorBase = _Plain
    SupportsHMA = _Marker
    WorkerMetadata = object
    ConnectorMetadata = object
    HandshakeMetadata = object
    StatsBase = _Plain
    PromMetricsBase = _Plain
else:
    ConnectorBase = _find(f"{_V1}.base", "KVConnectorBase_V1") or _Plain
    SupportsHMA = _find(f"{_V1}.base", "SupportsHMA") or _Marker
    WorkerMetadata = _find(f"{_V1}.base", "KVConnectorWorkerMetadata") or object
    ConnectorMetadata = _find(f"{_V1}.base", "KVConnectorMetadata") or object
    HandshakeMetadata = _find(f"{_V1}.base", "KVConnectorHandshakeMetadata") or object
    StatsBase = _find(f"{_V1}.metrics", "KVConnectorStats") or _Plain
    PromMetricsBase = _find(f"{_V1}.metrics", "KVConnectorPromMetrics") or _Plain


_sources = _find("vllm.v1.metrics.cache_hit_source", "CacheHitSource")
HIT_SOURCE: Any = None if _sources is None else _sources.P2P
"""Where tokens that were loaded come from, in vLLM's metrics."""


def log_with_the_engine() -> None:
    """Have our lines written as vLLM's own are, with their time and process.

    vLLM gives its own loggers a handler and nobody else's: lines of others have neither, or are not written at all.
    """
    ours, theirs = logging.getLogger("p2pkv"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())


def engine_core() -> Any:
    """Return the class of vLLM's engine; None in processes without one, which a scheduler's never is."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


def version() -> str:
    """Return vLLM's version: what lies inside a block is its business, and may change with any release."""
    return str(_find("vllm", "__version__") or "none")


def attention_isa(dtype: object, block_size: int, head_size: int | None, cache_dtype: str) -> str:
    """Return the instruction set by which vLLM's CPU attention packs a block; empty elsewhere.

    The bytes of a block depend on it, and neither its shape nor its strides show it.
    """
    find_isa = _find("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa")
    return "" if find_isa is None else str(find_isa(dtype, block_size, head_size, cache_dtype))


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return vLLM's record of finished transfers."""
    make = _find(f"{_V1}.base", "KVConnectorTransferResults")
    return (sent, received, failed) if make is None else make(sent, received, failed)


def extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    """Return what the hash of a block is of besides the tokens from ``start`` to ``end``, as vLLM's events have it."""
    make = _find("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys")
    show = _find("vllm.v1.core.kv_cache_utils", "to_event_extra_keys")
    if make is None or show is None:
        return None
    extra, _ = make(request, start, end, 0)
    shown = show([extra])
    return None if shown is None else shown[0]


def _shown(hashes: list[bytes]) -> list[Any]:
    convert = _find("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash")
    return list(hashes) if convert is None else [convert(h) for h in hashes]


def blocks_removed(hashes: list[bytes], medium: str, group: int) -> Any:
    """Return vLLM's event of blocks that a medium has no more."""
    make = _find("vllm.distributed.kv_events", "BlockRemoved") or SimpleNamespace
    return make(block_hashes=_shown(hashes), medium=medium, group_idx=group)


def blocks_stored(
    hashes: list[bytes],
    medium: str,
    group: int,
    *,
    before: bytes | None,
    tokens: list[int],
    lora: tuple[int, str] | None,
    extra: list[tuple[Any, ...] | None],
) -> Any:
    """Return vLLM's event of blocks, one after another, that a medium has now. ``tokens``: none if not known."""
    make = _find("vllm.distributed.kv_events", "BlockStored") or SimpleNamespace
    return make(
        block_hashes=_shown(hashes),
        parent_block_hash=None if before is None else _shown([before])[0],
        token_ids=tokens,
        block_size=len(tokens) // len(hashes),
        lora_id=None if lora is None else lora[0],
        lora_name=None if lora is None else lora[1],
        medium=medium,
        extra_keys=extra or None,
        group_idx=group,
    )


def metric_per_engine(metric: Any, labels: dict[int, list[object]]) -> Any:
    """Return ``metric`` for each engine of this server, by its number."""
    make = _find("vllm.v1.metrics.utils", "create_metric_per_engine")
    assert make is not None, "only vLLM asks for its metrics"
    return make(metric, labels)
