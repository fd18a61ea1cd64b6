"""What is in blocks that vLLM's KV events tell of, and what comes before them: by that an index finds them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from p2pkv.integrations.vllm_connector import installed
from p2pkv.integrations.vllm_connector.groups import Group
from p2pkv.integrations.vllm_connector.request import Request
from p2pkv.integrations.vllm_connector.residents import BlockName

_SPARE = 1 << 16
"""So many blocks may be known that are nowhere, beside those that are somewhere."""


@dataclass(frozen=True, slots=True)
class Contents:
    """One block's."""

    before: bytes | None
    """The hash of the block before it; None: it is a prompt's first."""
    tokens: array[int]
    lora: tuple[int, str] | None
    """vLLM's number and name of the adapter."""
    extra: tuple[Any, ...] | None
    """What the block's hash is of besides, in the form that vLLM's events have it."""


class BlockContents:
    """Used by the scheduler's thread alone."""

    def __init__(self) -> None:
        self._known: dict[BlockName, Contents] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, request: Request, number: int, group: Group, blocks: range, hash_size: int) -> None:
        """Take what is in the ``blocks`` of a request, which have hashes. ``number``: the group's."""
        first = max(0, blocks.start - 1)
        hashes = group.hashes(request.block_hashes, hash_size, range(first, blocks.stop))
        before = hashes.pop(0) if blocks.start else None
        lora = None
        if request.lora_request is not None:
            lora = (int(request.lora_request.adapter_id), str(request.lora_request.name))
        for block, block_hash in zip(blocks, hashes, strict=True):
            start, end = block * group.block_size, (block + 1) * group.block_size
            tokens = array("i", request.all_token_ids[start:end])
            extra = installed.extra_keys(request, start, end)
            self._known[BlockName(number, block_hash)] = Contents(before, tokens, lora, extra)
            before = block_hash

    def prune(self, there: Collection[tuple[str, BlockName]]) -> None:
        """Forget blocks that are in no medium, if there are many. ``there``: media and what is in them."""
        if len(self._known) > len(there) + _SPARE:
            self._known = {name: self._known[name] for _, name in there if name in self._known}

    def runs(self, group: int, hashes: Sequence[bytes]) -> list[list[tuple[bytes, Contents | None]]]:
        """Cut blocks into runs of which each block comes after the one before, as one event tells them.

        No block is told before the one that it follows, if both are among them: an index drops those whose parents it
        does not know.
        """
        runs: list[list[tuple[bytes, Contents | None]]] = []
        last: tuple[bytes, Contents | None] | None = None
        for block_hash in self._parents_first(group, hashes):
            contents = self._known.get(BlockName(group, block_hash))
            if last is None or not _follows(contents, *last):
                runs.append([])
            last = (block_hash, contents)
            runs[-1].append(last)
        return runs

    def _parents_first(self, group: int, hashes: Sequence[bytes]) -> list[bytes]:
        left = dict.fromkeys(hashes)
        ordered: list[bytes] = []
        for block_hash in hashes:
            chain: list[bytes] = []
            at: bytes | None = block_hash
            while at is not None and at in left:
                del left[at]
                chain.append(at)
                contents = self._known.get(BlockName(group, at))
                at = contents.before if contents is not None else None
            ordered += reversed(chain)
        return ordered


def _follows(contents: Contents | None, hash_before: bytes, before: Contents | None) -> bool:
    if contents is None or before is None:
        return contents is before
    return contents.before == hash_before and contents.lora == before.lora
