"""Values like those of KV caches, to see how much smaller they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.model import PAGE, Model, Shape, encode
from demo.paged_kv import Floats, PagedKV

_N_NORMAL = 32 << 20


def as_bfloat16(values: Floats) -> NDArray[np.uint16]:
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def normal() -> Floats:
    return np.random.default_rng(5).standard_normal(_N_NORMAL).astype(np.float32)


def demo_engine() -> Floats:
    """Keys and values that the demo's model computes for this file's text."""
    shape = Shape(n_layers=4)
    tokens = encode(Path(__file__).read_bytes())[: 32 * PAGE]
    kv = PagedKV(len(tokens) // PAGE, shape.page)
    model = Model(shape)
    pages = kv.take(len(tokens) // PAGE)
    for page in range(len(pages)):
        model.run_page(tokens[page * PAGE : (page + 1) * PAGE], pages[: page + 1], kv)
    return np.concatenate([kv.k.ravel(), kv.v.ravel()])


KINDS: dict[str, Callable[[], NDArray[np.generic]]] = {
    "bfloat16, normal": lambda: as_bfloat16(normal()),
    "float16, normal": lambda: normal().astype(np.float16),
    "float32, the demo's": demo_engine,
    "bfloat16, the demo's": lambda: as_bfloat16(demo_engine()),
    "float16, the demo's": lambda: demo_engine().astype(np.float16),
}
