"""vLLM's KV caches as p2pkv sees them: where the blocks lie, and what a block is made of.

Only whole blocks move: inside of a block the attention kernel packs keys and values as it likes, head after head or
token after token. A block is one *row* a layer, each a contiguous run of bytes; its rows come in the order of the
layers. As a page of the page cache it is one entry with a piece for each row.

Some kernels take smaller blocks than vLLM gives out. Their tensors count those: several for each of vLLM's blocks,
which are one row where they follow each other, and a row each where they don't.

Each group of layers has caches and block tables of its own, though one memory may hold the caches of several: a block
is of one group at a time. Layers with a state may have several tensors each.

Blocks may be in host memory or in that of a CUDA device. There the model writes them on a stream, which runs behind the
worker: whoever reads a block, or writes to one that was somebody else's, waits for the stream first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import ConfigError
from p2pkv.integrations.ranges import storages
from p2pkv.integrations.vllm_connector.groups import Group
from p2pkv.integrations.vllm_connector.tiles import Tiles
from p2pkv.page import Pieces


class GroupCaches:
    """The caches of one group's layers; immutable. ``row_nbytes`` is the length of each row of a block."""

    def __init__(self, tensors: Sequence[tuple[str, Any]], n_blocks: int) -> None:
        """Look at tensors and the layers that they are of."""
        rows = [row for name, tensor in tensors for row in _rows(name, tensor, n_blocks)]
        self._n_blocks = n_blocks
        self._bases, self._strides, self._lengths = np.array(rows, np.int64).T
        self._layer_of_row = tuple(name for name, tensor in tensors for _ in _rows(name, tensor, n_blocks))
        self.row_nbytes: list[int] = self._lengths.tolist()
        self.layers = tuple(name for name, _ in tensors)
        self.tiles = Tiles.of(tensors, n_blocks)
        self.layout = _layout([tensor for _, tensor in tensors], n_blocks)

    @property
    def n_rows(self) -> int:
        """Rows of a block."""
        return len(self.row_nbytes)

    def numbers(self, layers: Sequence[str]) -> list[int]:
        """Return the places of some layers among the group's."""
        places = {name: number for number, name in enumerate(self.layers)}
        return [places[name] for name in layers]

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block, over all layers of the group."""
        return int(self._lengths.sum())

    def layers_of(self, rows: range) -> frozenset[str]:
        """Return the layers that rows of these numbers are of."""
        return frozenset(self._layer_of_row[rows.start : rows.stop])

    def rows(self, block_ids: Sequence[int], of: range) -> NDArray[np.int64]:
        """Return the ``(len(block_ids) * len(of), 2)`` addresses and lengths of some rows of each block, in turn."""
        return self._pieces(block_ids, of).reshape(-1, 2)

    def pieces(self, block_ids: Sequence[int]) -> Pieces:
        """Return the blocks as pages."""
        return Pieces(self._pieces(block_ids, range(self.n_rows)))

    def _pieces(self, block_ids: Sequence[int], of: range) -> NDArray[np.int64]:
        ids = np.asarray(block_ids, np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self._n_blocks):
            raise IndexError(f"block {ids.max()} of {self._n_blocks}")
        rows = slice(of.start, of.stop)
        pieces = np.empty((len(ids), len(of), 2), np.int64)
        pieces[:, :, 0] = self._bases[rows] + ids[:, None] * self._strides[rows]
        pieces[:, :, 1] = self._lengths[rows]
        return pieces


class KVCaches:
    """The caches of one rank, by group; immutable."""

    def __init__(
        self,
        caches: Mapping[str, Any],
        *,
        groups: Sequence[Group],
        n_blocks: int,
        current_stream: Callable[[object], int],
    ) -> None:
        """Look at ``caches``, a tensor or several for each layer; ``current_stream`` tells the calling thread's.

        ``n_blocks`` is how many blocks vLLM gives out. Raises :class:`~p2pkv.errors.ConfigError` for blocks that are
        not contiguous, neither in host memory nor all on one CUDA device, or no multiple of ``n_blocks``.
        """
        by_group = [_tensors(caches, group) for group in groups]
        tensors = [tensor for of_group in by_group for _, tensor in of_group]
        if not tensors:
            raise ConfigError("vLLM registered no KV cache; there is nothing to hand off")
        devices = {str(tensor.device): tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ConfigError(
                f"the KV caches lie on {', '.join(sorted(devices))}; p2pkv takes one device a rank"
            )
        self._device = tensors[0].device
        self._current_stream = current_stream
        self.n_blocks = n_blocks
        # a stage of a pipeline may have no layer of some group
        self.groups = tuple(GroupCaches(of_group, n_blocks) if of_group else None for of_group in by_group)
        self.ranges = storages(tensors)
        self.layouts = tuple("" if group is None else group.layout for group in self.groups)

    @property
    def layers(self) -> frozenset[str]:
        """All that have a cache of their own here."""
        return frozenset(name for group in self.groups if group is not None for name in group.layers)

    @property
    def layout(self) -> str:
        """What the bytes of all blocks depend on as far as the tensors tell."""
        return " | ".join(self.layouts)

    @property
    def max_row_nbytes(self) -> int:
        """Bytes of the longest row."""
        return max(nbytes for group in self.groups if group is not None for nbytes in group.row_nbytes)

    def stream(self) -> int | None:
        """Return the stream that this thread's kernels use blocks on; None: blocks are in host memory.

        To be asked by vLLM's worker thread.
        """
        return None if self._device.type == "cpu" else self._current_stream(self._device)


def _tensors(caches: Mapping[str, Any], group: Group) -> list[tuple[str, Any]]:
    """Return the tensors of a group's layers, each once: layers may share one cache."""
    found: dict[int, tuple[str, Any]] = {}
    for name, given in caches.items():
        if group.layers is not None and name not in group.layers:
            continue
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            _check(name, tensor)
            found.setdefault(tensor.data_ptr(), (name, tensor))
    return list(found.values())


def _check(name: str, tensor: Any) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the KV cache of layer {name} lies on {tensor.device}; p2pkv hands off KV in host memory and on CUDA "
            "devices only"
        )
    if not _is_one_run(tensor.shape[1:], tensor.stride()[1:]):
        raise ConfigError(
            f"the blocks of layer {name} are not contiguous (shape {tuple(tensor.shape)}, strides "
            f"{tuple(tensor.stride())}); p2pkv moves whole blocks, start vLLM with VLLM_KV_CACHE_LAYOUT=HND"
        )


def _is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of this shape lie in a row, in whichever order of the dimensions."""
    n_elements = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != n_elements:
            return False
        n_elements *= size
    return True


def _rows(name: str, tensor: Any, n_blocks: int) -> list[tuple[int, int, int]]:
    """Return of each row of a layer's blocks the address in block 0, the bytes from block to block, and the length."""
    n_parts, rest = divmod(len(tensor), n_blocks)
    if rest or not n_parts:
        raise ConfigError(
            f"the KV cache of layer {name} has {len(tensor)} blocks, which is no multiple of vLLM's {n_blocks}"
        )
    address, step = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
    nbytes = tensor[0].numel() * tensor.element_size()
    if step == nbytes:
        return [(address, n_parts * step, n_parts * nbytes)]
    return [(address + part * step, n_parts * step, nbytes) for part in range(n_parts)]


def _layout(tensors: Sequence[Any], n_blocks: int) -> str:
    """Return what the bytes of a block depend on as far as the tensors tell; the number of blocks is not part of it."""
    kinds = [
        f"{len(tensor) // n_blocks} of " * (len(tensor) > n_blocks)
        + f"{tuple(tensor.shape[1:])} {tuple(tensor.stride()[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors
    ]
    is_uniform = len(set(kinds)) == 1
    return f"{len(kinds)} layers of {kinds[0]}" if is_uniform else "; ".join(kinds)
