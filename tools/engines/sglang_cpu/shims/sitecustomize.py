"""Lets the PyPI build of SGLang, which is made for CUDA, run on a machine without a GPU.

Python imports this by itself where this folder is in PYTHONPATH. No file of SGLang is changed: what exists on a GPU
only is stood in for. Streams and events do nothing, since on a CPU everything has happened when a call returns.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def record(self, _stream: object = None) -> None:
        self._at = time.perf_counter()

    def wait(self, _stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later._at - self._at) * 1e3


class Stream:
    """A stream on which everything is done at once; its own context."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Pinned memory is for a GPU to read."""

    def unpinned(*arguments: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return unpinned


def stand_in_for_cuda() -> None:
    """Give torch's CPU build what SGLang takes for granted on every device."""
    # the PyPI build of torchvision has its operators in a CUDA library; their signatures are enough to import it
    vision = torch.library.Library("torchvision", "FRAGMENT")
    vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    vision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._p2pkv_vision = vision  # the definitions last as long as this object
    stream = Stream()
    torch.cpu.Event, torch.cpu.Stream, torch.cpu.StreamContext = Event, Stream, Stream
    torch.cpu.stream = lambda _stream=None: stream
    torch.cpu.current_stream = lambda _device=None: stream
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def give_copies(module: ModuleType) -> None:
    """Host pools import these only on a GPU."""
    kvcacheio = importlib.import_module("sgl_kernel.kvcacheio")
    for name in kvcacheio.COPIES:
        setattr(module, name, getattr(kvcacheio, name))


def give_no_registration(module: ModuleType) -> None:
    """Nothing is registered with CUDA."""
    module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None


def unpin_host_pools(module: ModuleType) -> None:
    """Host pools choose their allocator by ``pin_memory``."""
    made = module.HostKVCache.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options | {"pin_memory": False})

    module.HostKVCache.__init__ = init


AFTER_IMPORT = {
    "sglang.srt.mem_cache.pool_host.base": unpin_host_pools,
    "sglang.srt.mem_cache.pool_host.common": give_no_registration,
    "sglang.srt.mem_cache.pool_host.mha": give_copies,
    "sglang.srt.mem_cache.pool_host.mla": give_copies,
}


class Finder(importlib.abc.MetaPathFinder):
    """Runs what ``AFTER_IMPORT`` says once a module is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_adapt(module: ModuleType) -> None:
            run(module)
            AFTER_IMPORT[fullname](module)

        spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec


stand_in_for_cuda()
sys.meta_path.insert(0, Finder())
