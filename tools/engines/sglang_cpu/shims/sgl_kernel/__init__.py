"""Stands in for SGLang's CUDA kernels: any name can be imported, and says so when it is called.

Only ``kvcacheio`` does something: copies between the device's KV and the host pools, here all in one memory.
"""

from __future__ import annotations

import shlex
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class Missing:
    """A kernel that isn't there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in on a CPU")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"sgl_kernel.{name}")


def copy_all_layer_kv_cache_cpu(*_: Any, **__: Any) -> Any:
    """Looked for at import by SGLang's CPU backend."""
    raise NotImplementedError("copy_all_layer_kv_cache_cpu has no stand-in on a CPU")


for _name in shlex.split(
    "allreduce attention elementwise flash_attn flash_mla gemm load_utils mamba moe quantization sampling "
    "scalar_type sparse_flash_attn spatial speculative top_k"
):
    _module = ModuleType(f"sgl_kernel.{_name}")
    _module.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[f"sgl_kernel.{_name}"] = _module
