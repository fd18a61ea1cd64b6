"""KV events as vLLM and SGLang send them: msgpack of a batch, whose events are maps with their type's name.

Field names, their order in a batch and the defaults that are left out are those of ``vllm.distributed.kv_events``; its
decoders read these messages. ``docs/events.md`` says what a node puts into the fields. SGLang has the same schema, but
for hashes, which are numbers there; vLLM takes both.
"""

from __future__ import annotations

from enum import Enum

import msgspec

MEMORY = "CPU"
"""The ``medium`` of pages in a node's pool; vLLM's name for memory of the host."""
DISK = "STORAGE"
"""The ``medium`` of pages in a node's disk tier."""


class Hashes(Enum):
    """What pages are called by in messages."""

    BYTES = "bytes"
    """Pages are called by their keys."""
    NUMBERS = "numbers"
    """Pages are called by the last 8 bytes of their keys, big-endian and without a sign."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All events have the type's name, as ``type``."""


class BlockStored(KVCacheEvent):
    """These pages can be read from that medium of this node."""

    block_hashes: list[bytes]
    """Keys of 16 bytes; :func:`p2pkv.page_key` says which page has which."""
    parent_block_hash: bytes | None
    """Always None: a node doesn't know which page follows which."""
    token_ids: list[int]
    """Always empty: a node doesn't know the tokens."""
    block_size: int
    """Always 0, for the same reason; tokens."""
    lora_id: int | None
    """Always None: what tells adapters apart is in the key."""
    medium: str | None
    lora_name: str | None
    """Always None."""


class BlockRemoved(KVCacheEvent):
    """These pages are not in that medium of this node any more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """Nothing that this node has told so far holds; what is there is told behind it."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in the order in which they happened."""

    ts: float
    """When it was sent; seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()


def stored(keys: list[bytes], medium: str) -> BlockStored:
    """Return the event of pages that are there now."""
    return BlockStored(keys, None, [], 0, None, medium, None)


def encode(
    events: list[BlockStored | BlockRemoved | AllBlocksCleared], now: float, hashes: Hashes = Hashes.BYTES
) -> bytes:
    """Return the message of a batch; rank 0, which every consumer of vLLM's events knows."""
    if hashes is Hashes.BYTES:
        return _encoder.encode(KVEventBatch(now, events, 0))
    return _encoder.encode((now, [_with_numbers(event) for event in events], 0))


def _with_numbers(event: BlockStored | BlockRemoved | AllBlocksCleared) -> dict[str, object]:
    fields: dict[str, object] = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    if not isinstance(event, AllBlocksCleared):
        fields["block_hashes"] = [int.from_bytes(key[-8:], "big") for key in event.block_hashes]
    return fields
