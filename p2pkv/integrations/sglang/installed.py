"""The one place that looks for SGLang. Where it isn't installed, ``object`` does as well for a base class."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

__all__ = ["StorageBase", "find", "kv_kind", "served_model", "server_settings"]


def find(module: str, name: str) -> Any | None:
    """Return something of SGLang's, or None where SGLang isn't installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sglang":
            raise  # SGLang is there, but something it needs is not
        return None


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


def kv_kind() -> str:
    """Return what else this process's server was told that its KV depends on; empty where there is no server.

    Host pools keep every FP8 format as bytes, so their dtype does not tell which it is.
    """
    told = server_settings("server_args")
    if told is None:
        return ""
    return f"kv_cache_dtype={told.kv_cache_dtype} quantization={told.quantization} {_variant(told)}".rstrip()


def served_model() -> str:
    """Return the name of this process's model, with what makes another model of it; empty where there is no server."""
    told, serving = server_settings("server_args"), server_settings("serving")
    return "" if told is None or serving is None else f"{serving.served_model_name} {_variant(told)}".rstrip()


def _variant(told: Any) -> str:
    """Return in what a model differs from others of its name: revision, and overrides such as a longer context's."""
    overrides = json.loads(told.json_model_override_args or "{}")
    parts = [f"revision={told.revision}"] if told.revision else []
    parts += [f"overrides={json.dumps(overrides, sort_keys=True)}"] if overrides else []
    return " ".join(parts)
