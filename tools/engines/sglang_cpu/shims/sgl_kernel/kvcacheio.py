"""The copies of ``--hicache-io-backend direct``; the signatures are SGLang's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

COPIES = (
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_all_layer_direct_lf_pf",
)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between layers of the same shape."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from host pages ``[page, layer, token, ...]`` to device tokens."""
    pages = _pages(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *source.shape[3:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy device tokens of all layers (of K, then of V) to host pages ``[page, layer, token, ...]``."""
    pages = _pages(dst_indices, page_size)
    n_layers = len(src_ptrs) // len(dst_ptrs)
    for i, target in enumerate(dst_ptrs):
        for layer in range(n_layers):
            source = src_ptrs[i * n_layers + layer]
            target[pages, layer] = source[src_indices].reshape(-1, page_size, *source.shape[1:])


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.view(-1, page_size)[:, 0] // page_size
