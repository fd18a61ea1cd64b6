"""The one place that looks for SGLang. Where it isn't installed, ``object`` does as well for a base class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["StorageBase", "find", "kv_precision", "server_settings"]


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


def kv_precision() -> str:
    """Return what this process's server was told of its KV's precision; empty where there is no server.

    Host pools keep every FP8 format as bytes, so their dtype does not tell which it is.
    """
    told = server_settings("server_args")
    return "" if told is None else f"kv_cache_dtype={told.kv_cache_dtype} quantization={told.quantization}"
