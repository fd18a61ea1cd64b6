"""The one place that looks for SGLang: its class if it is installed, else ``object``, which does as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    StorageBase = object
else:
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as StorageBase
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sglang":
            raise  # SGLang is there, but something it needs is not
        StorageBase = object

__all__ = ["StorageBase"]
