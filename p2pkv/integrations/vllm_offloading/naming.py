"""What makes vLLM's chunks of one name differ, as far as vLLM tells a tier: the namespace of the tier's pages."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from typing import Any

from p2pkv.config import Config
from p2pkv.integrations.vllm_connector.settings import Fingerprint
from p2pkv.integrations.vllm_offloading import installed

_log = logging.getLogger(__name__)


def namespace(offered: Any, tenant: str, chunk_nbytes: int) -> str:
    """Return it, of vLLM's ``OffloadingConfig`` and the ``namespace`` of the settings.

    vLLM tells a tier the name of its model, and neither its revision, nor its configuration, nor how its weights are
    quantized. Whoever wants to share says what they are by a ``namespace``; without one nobody shares.
    """
    if tenant == Config().namespace:
        tenant = secrets.token_hex(16)
        _log.warning(
            "nobody shares this server's chunks: vLLM does not tell a tier which revision, configuration and "
            "quantization its model has; set 'namespace' to a name that all servers of this very model have, and no "
            "others"
        )
    groups = [(group.tokens_per_block, list(group.layer_names)) for group in offered.groups]
    parallel = offered.parallel
    fields = {
        "stores": "chunks",
        "vllm": installed.version(),
        "model": offered.model.name,
        "dtype": offered.model.dtype,
        "groups": hashlib.blake2b(json.dumps(groups).encode(), digest_size=8).hexdigest(),
        "hash_tokens": offered.cache.tokens_per_hash,
        "chunk_blocks": offered.cache.blocks_per_chunk,
        "chunk_nbytes": chunk_nbytes,
        "layout": f"{offered.kv_cache_layout} canonical={offered.canonical_layout} single={offered.replicated_layout}",
        # also where vLLM takes chunks of other sizes for the same: their bytes are in the order of its ranks
        "ranks": f"{parallel.world_size} tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} "
        f"dcp={parallel.dcp_size}",
    }
    return Fingerprint({name: str(value) for name, value in fields.items()}).namespace(tenant)
