"""SGLang's device pools as numpy has them, in groups as SGLang 0.5.23 makes them for its cache linkers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from host_pools import HEADS, LAYERS, WIDTH, TensorFake
from p2pkv.integrations.sglang.device_group import Offered


class Allocation:
    """The part of torch's untyped storages that tells where memory is."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def nbytes(self) -> int:
        return self._array.nbytes


class DeviceTensor(TensorFake):
    """A tensor that is all of its allocation."""

    def untyped_storage(self) -> Allocation:
        return Allocation(self.array)


class DeviceEntryFake:
    """``n_pages`` pages of a plain pool: a tensor for each layer's K, then for each layer's V; of MLA, one a layer."""

    def __init__(
        self,
        *,
        kind: str = "mha",
        n_pages: int = 16,
        page_size: int = 16,
        dtype: str = "float16",
        heads: int = HEADS,
    ) -> None:
        self.kind, self.page_size, self.n_pages = kind, page_size, n_pages
        n_tensors, heads = (2 * LAYERS, heads) if kind == "mha" else (LAYERS, 1)
        self.arrays = [np.zeros((n_pages * page_size, heads, WIDTH), dtype) for _ in range(n_tensors)]
        self.tensors = [DeviceTensor(array) for array in self.arrays]
        self.buffer_meta = [[(a.ctypes.data, a.strides[0], a.strides[0] * page_size) for a in self.arrays]]

    def get_hybrid_pool_buffer(self) -> Sequence[Any]:
        return self.tensors

    def prepare_locations(self, indices: Any) -> list[int]:
        pages = np.asarray(indices).reshape(-1, self.page_size)
        if not (pages == pages[:, :1] // self.page_size * self.page_size + np.arange(self.page_size)).all():
            raise ValueError("aligned contiguous pages are required")
        return [int(row) for row in pages[:, 0]]

    def indices(self, *pages: int) -> np.ndarray:
        return np.concatenate([np.arange(self.page_size) + page * self.page_size for page in pages])

    def fill(self, page: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        for piece in self._pieces(page):
            piece[:] = random.integers(-128, 128, piece.shape).astype(piece.dtype)

    def content(self, page: int) -> bytes:
        return b"".join(piece.tobytes() for piece in self._pieces(page))

    def _pieces(self, page: int) -> list[np.ndarray]:
        return [array[page * self.page_size : (page + 1) * self.page_size] for array in self.arrays]


class GroupFake:
    """Pools by name, each of which takes the transfer of its own name."""

    def __init__(self, entries: dict[str, DeviceEntryFake]) -> None:
        self.entry_map = entries
        self.num_layers = LAYERS
        self.rank_replicated = False

    def resolve_transfers(
        self, transfers: Sequence[Any], *, allow_partial: bool = False, allow_missing_kv: bool = False
    ) -> list[Any]:
        named = {str(t.name): t for t in transfers if t.keys}
        if not named or ("kv" not in named and not allow_missing_kv):
            return []
        if not allow_partial and set(self.entry_map) - set(named):
            return []
        return [
            SimpleNamespace(
                name=name, keys=list(t.keys), hit_policy=t.hit_policy, host_indices=t.device_indices
            )
            for name in self.entry_map
            if (t := named.get(name)) is not None
        ]


def transfer(keys: Sequence[str], indices: Any = None, **more: Any) -> SimpleNamespace:
    """Return what SGLang asks for: pages of the pool ``kv``, unless ``more`` says otherwise."""
    asked = {"name": "kv", "keys": list(keys), "hit_policy": "all_pages", "device_indices": indices}
    return SimpleNamespace(**asked | more)


def offered(
    entries: dict[str, DeviceEntryFake],
    storage_config: SimpleNamespace,
    agree: Callable[[bool], bool] = bool,
) -> Offered:
    """Return what SGLang offers a linker; one pool alone is a plain one."""
    kinds = [entry.kind for entry in entries.values()]
    return Offered(
        group=GroupFake(entries),
        halves={"mha": 2, "mla": 1}[kinds[0]] if len(kinds) == 1 else 0,
        storage_config=storage_config,
        agree=agree,
        stream=lambda: None,
        layer_counter=None,
    )
