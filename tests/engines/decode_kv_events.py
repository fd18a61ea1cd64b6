"""Decode batches of KV events with an engine's own classes: hex lines in, JSON lines out.

Runs in the engine's venv, with the name of the module that has the classes. Hashes are shown as vLLM and SGLang have
them: hexadecimal if they are bytes.
"""

import importlib
import json
import sys

import msgspec

types = importlib.import_module(sys.argv[1])
decoder = msgspec.msgpack.Decoder(type=types.KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    told = []
    for event in batch.events:
        if isinstance(event, types.AllBlocksCleared):
            told.append(["cleared", "", []])
        else:
            kind = "stored" if isinstance(event, types.BlockStored) else "removed"
            hashes = [block.hex() if isinstance(block, bytes) else block for block in event.block_hashes]
            told.append([kind, event.medium, hashes])
    _, _, rank = msgspec.structs.astuple(batch)
    print(json.dumps({"rank": rank, "events": told}))
