"""What vLLM's KV events tell of chunks that its scheduler's node has in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from p2pkv.integrations.vllm_connector.residents import BlockName, Residents
from p2pkv.integrations.vllm_offloading import installed
from p2pkv.node import Node

_GROUP_NBYTES = 4
"""Of vLLM's key of a chunk: the end of it, after the hash of its last block."""


class ChunkEvents:
    """Told by the node's events and a storing thread, asked by the scheduler's. Thread-safe."""

    def __init__(self, node: Node) -> None:
        """Follow ``node``. Raises :class:`~p2pkv.errors.UsageError` if it tells no events."""
        self._residents = Residents(0, node.config.namespace)
        node.follow_kv_events(self._residents.hear)

    def name(self, keys: Sequence[bytes], names: Sequence[bytes], epoch: int) -> None:
        """Say which chunks, by vLLM's keys, are about to be published under which names, before they are."""
        self._residents.name(names, epoch, [_block(key) for key in keys])

    def take(self) -> Iterator[Any]:
        """Yield vLLM's events since the last time."""
        for (medium, is_stored), changes in groupby(
            self._residents.take(), lambda c: (c.medium, c.is_stored)
        ):
            yield installed.offloading_event([_key(c.block) for c in changes], medium, is_stored=is_stored)


def _block(key: bytes) -> BlockName:
    return BlockName(int.from_bytes(key[-_GROUP_NBYTES:], "big"), key[:-_GROUP_NBYTES])


def _key(block: BlockName) -> bytes:
    return block.hash + block.group.to_bytes(_GROUP_NBYTES, "big")
