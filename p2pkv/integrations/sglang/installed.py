"""The one place that looks for SGLang. Where it isn't installed, ``object`` does as well for a base class."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from p2pkv.errors import UsageError
from p2pkv.integrations import engine
from p2pkv.integrations.identity import config_digest, file_digest

__all__ = [
    "StorageBase",
    "batch_pages",
    "find",
    "has_no_states",
    "kv_heads",
    "kv_kind",
    "served_model",
    "server_settings",
    "stage_layers",
]

_MODEL_CONFIG = ("sglang.srt.arg_groups.model_override_base", "model_config_of")


find = functools.partial(engine.find, is_needed=False)
"""Returns something of SGLang's, or None where SGLang isn't installed or, being another version, lacks it."""

if TYPE_CHECKING:
    StorageBase = object
else:
    StorageBase = find("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage") or object


def server_settings(name: str) -> Any | None:
    """Return a part of what this process's server was told, such as ``serving``; None where there is no server."""
    read = find("sglang.srt.runtime_context", f"get_{name}")
    if read is None:
        return None
    try:
        return read()
    except ValueError:  # SGLang is installed, but this is no server
        return None


def has_no_states() -> bool:
    """Say whether this process's model is known to have no states beside its KV, as Mamba's and its like."""
    told, config_of = server_settings("server_args"), find(*_MODEL_CONFIG)
    states_of = find("sglang.srt.configs.hybrid_arch", "mambaish_config")
    if told is None or config_of is None or states_of is None:
        return False
    return states_of(config_of(told)) is None


def batch_pages() -> int:
    """Return how many pages SGLang writes at once."""
    return int(find("sglang.srt.mem_cache.hicache_storage", "STORAGE_BATCH_SIZE") or 128)


def kv_heads() -> int:
    """Return how many KV heads this process's model has over all ranks; 0 where nobody says, or layers differ in it."""
    told, config_of = server_settings("server_args"), find(*_MODEL_CONFIG)
    if told is None or config_of is None:
        return 0
    try:
        return int(config_of(told).get_total_num_kv_heads())
    except (RuntimeError, ValueError):  # SGLang's word for layers that differ
        return 0


def stage_layers(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Return how many of a model's layers each pipeline stage has, as this process's SGLang shares them out.

    Raises :class:`~p2pkv.errors.UsageError` if this process was told of another number of stages or layers.
    """
    indices = find("sglang.srt.distributed.utils", "get_pp_indices")
    assert indices is not None, "only SGLang has pipeline stages"
    try:
        ends = [indices(n_layers, stage, n_stages) for stage in range(n_stages)]
    except ValueError as error:
        raise UsageError(
            f"prefill has {n_stages} pipeline stages, and how they share {n_layers} layers is not known: {error}; "
            "SGLANG_PP_LAYER_PARTITION must be the same for both servers"
        ) from error
    return tuple(end - first for first, end in ends)


def kv_kind() -> str:
    """Return what else this process's server was told that its KV depends on; empty where there is no server.

    Host pools keep every FP8 format as bytes, so their dtype does not tell which it is, nor by what they are scaled. A
    draft model's KV lies beside the model's, in side pools or in the same. Raises
    :class:`~p2pkv.errors.ConfigError` if a file that matters can't be read.
    """
    told = server_settings("server_args")
    if told is None:
        return ""
    parts = [f"kv_cache_dtype={told.kv_cache_dtype} quantization={told.quantization}"]
    scales = getattr(told, "quantization_param_path", None)
    if scales:
        parts.append(f"kv_scales={file_digest('--quantization-param-path', scales)}")
    draft = getattr(told, "speculative_draft_model_path", None)
    if draft:
        revision = getattr(told, "speculative_draft_model_revision", None)
        parts.append(f"draft={draft!r} draft_revision={revision}")
    return " ".join([*parts, _variant(told)]).rstrip()


def served_model() -> str:
    """Return the name of this process's model, with what makes another model of it; empty where there is no server."""
    told, serving = server_settings("server_args"), server_settings("serving")
    if told is None or serving is None:
        return ""
    scales = getattr(told, "quantization_param_path", None)
    parts = [serving.served_model_name, _variant(told)]
    if scales:
        parts.append(f"kv_scales={file_digest('--quantization-param-path', scales)}")
    return " ".join(filter(None, parts))


def _variant(told: Any) -> str:
    """Return in what a model differs from others of its name: revision, configuration, overrides (a longer context)."""
    overrides = json.loads(told.json_model_override_args or "{}")
    parts = [f"revision={told.revision}"] if told.revision else []
    parts += [f"overrides={json.dumps(overrides, sort_keys=True)}"] if overrides else []
    config_of = find(*_MODEL_CONFIG)
    if config_of is not None:
        parts.append(f"config={config_digest(config_of(told).hf_config)}")
    return " ".join(parts)
