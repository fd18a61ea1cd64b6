"""The bytes of one request that go from prefill to decode, as numbered rows.

Both servers count alike: first the KV pages, page by page and in each page buffer by buffer; then the states, component
by component; then the metadata ("aux") of the request. A row is one item of one buffer. What a buffer is, and where
its memory lies, SGLang says at start (``KVArgs``); which items a request has, it says request by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError

Spans = NDArray[np.int64]
"""``(n, 2)``: address and bytes of each row."""
Items = NDArray[np.int32]
"""Numbers of pages, or of states."""


class KVArgs(Protocol):
    """What SGLang says of its buffers: for each its address, its bytes, and those of one item."""

    kv_data_ptrs: Sequence[int]
    kv_data_lens: Sequence[int]
    kv_item_lens: Sequence[int]
    aux_data_ptrs: Sequence[int]
    aux_data_lens: Sequence[int]
    aux_item_lens: Sequence[int]
    state_types: Sequence[str]
    state_data_ptrs: Sequence[Sequence[int]]
    state_data_lens: Sequence[Sequence[int]]
    state_item_lens: Sequence[Sequence[int]]


class Shape(msgspec.Struct, frozen=True):
    """What both servers must have alike: the model, and the bytes of an item in each buffer."""

    pages: tuple[int, ...]
    states: tuple[tuple[str, tuple[int, ...]], ...]
    metadata: tuple[int, ...]
    model: str = ""
    """Its name, and what makes another model of it: KV of two models may well have one form."""

    def difference(self, other: Shape) -> str | None:
        """Say in one sentence why rows of the two can't be paired, or None."""
        if self.model != other.model:
            return f"the model is {self.model!r} here and {other.model!r} there"
        if self.pages != other.pages:
            return f"pages have {_lengths(self.pages)} here and {_lengths(other.pages)} there"
        if self.states != other.states:
            mine, theirs = ([name for name, _ in shape.states] for shape in (self, other))
            return f"states are {mine} here and {theirs} there, or differ in length"
        if self.metadata != other.metadata:
            return (
                f"metadata has {_lengths(self.metadata)} here and {_lengths(other.metadata)} there; an option "
                "that adds to it (speculation, checksums, sampling masks) is on in one server only"
            )
        return None


def _lengths(lengths: Sequence[int]) -> str:
    kinds = sorted(set(lengths))
    shown = " or ".join(str(n) for n in kinds[:3]) + (" ..." if len(kinds) > 3 else "")
    return f"{len(lengths)} buffers of {shown} bytes"


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that the same items lie in: item ``i`` of buffer ``b`` at ``addresses[b] + i * item_nbytes[b]``."""

    addresses: NDArray[np.int64]
    item_nbytes: NDArray[np.int64]
    n_items: int
    """Items that every buffer has."""

    @classmethod
    def of(cls, pointers: Sequence[int], nbytes: Sequence[int], item_nbytes: Sequence[int]) -> Buffers:
        """Take SGLang's lists; buffers without bytes (a layer that shares another's) are left out."""
        kept = [
            (pointer, item, n // item)
            for pointer, n, item in zip(pointers, nbytes, item_nbytes, strict=True)
            if n and item
        ]
        return cls(
            np.array([pointer for pointer, _, _ in kept], np.int64),
            np.array([item for _, item, _ in kept], np.int64),
            min((n for _, _, n in kept), default=0),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Bytes of an item in each buffer."""
        return tuple(int(n) for n in self.item_nbytes)

    def places(self, items: Items) -> NDArray[np.int64]:
        """Return where ``items`` lie, ``(n, buffers)``. Raises :class:`UsageError` for an item that no buffer has."""
        numbers = np.asarray(items, np.int64).reshape(-1)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.n_items:
            raise UsageError(
                f"item {numbers.min()} or {numbers.max()} is asked for of buffers of {self.n_items} items"
            )
        return self.addresses + numbers[:, None] * self.item_nbytes

    def spans(self, items: Items) -> Spans:
        """Return the rows of ``items``, item by item. Raises :class:`UsageError` for an item that no buffer has."""
        places = self.places(items)
        spans = np.empty((*places.shape, 2), np.int64)
        spans[:, :, 0] = places
        spans[:, :, 1] = self.item_nbytes
        return spans.reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """All buffers of one server's rank, and how their items are numbered as rows."""

    pages: Buffers
    state_names: tuple[str, ...]
    states: tuple[Buffers, ...]
    metadata: Buffers
    model: str

    @classmethod
    def of(cls, args: KVArgs, model: str = "") -> RequestRows:
        """Take what SGLang says of its buffers, and of the ``model`` whose KV they hold."""
        states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
        return cls(
            Buffers.of(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
            tuple(str(getattr(kind, "value", kind)) for kind in args.state_types),
            tuple(Buffers.of(*component) for component in states),
            Buffers.of(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
            model,
        )

    @property
    def shape(self) -> Shape:
        """What the other server must have alike."""
        states = tuple((name, b.shape) for name, b in zip(self.state_names, self.states, strict=True))
        return Shape(self.pages.shape, states, self.metadata.shape, self.model)

    def end(self, states: Sequence[Items], slot: int) -> Spans:
        """Return what comes after the pages: the states, and the metadata of ``slot``."""
        parts = [buffers.spans(items) for buffers, items in zip(self.states, states, strict=True)]
        return np.concatenate([*parts, self.metadata.spans(np.array([slot], np.int32))])


def state_items(states: Sequence[object] | None, n_components: int) -> list[Items]:
    """Return SGLang's state indices, which may be None as a whole or for a component, as arrays."""
    given = list(states or [])[:n_components]
    given += [None] * (n_components - len(given))
    return [np.zeros(0, np.int32) if s is None else np.asarray(s, np.int32).reshape(-1) for s in given]


def memories(args: KVArgs) -> list[tuple[int, int]]:
    """Return address and bytes of every memory the buffers lie in; buffers that overlap are one."""
    kinds = [(args.kv_data_ptrs, args.kv_data_lens), (args.aux_data_ptrs, args.aux_data_lens)]
    kinds += zip(args.state_data_ptrs, args.state_data_lens, strict=True)
    ranges = sorted((p, p + n) for pointers, lens in kinds for p, n in zip(pointers, lens, strict=True) if n)
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return [(begin, end - begin) for begin, end in merged]
