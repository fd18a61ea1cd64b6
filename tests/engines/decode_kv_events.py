"""Decode batches of KV events with vLLM's own classes: hex lines in, JSON lines out. Runs in vLLM's venv."""

import json
import sys

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    told = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            told.append(["cleared", "", []])
        else:
            kind = "stored" if isinstance(event, BlockStored) else "removed"
            told.append([kind, event.medium, [block.hex() for block in event.block_hashes]])
    print(json.dumps({"rank": batch.data_parallel_rank, "events": told}))
