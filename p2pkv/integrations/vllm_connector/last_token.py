"""A prefill that stops one token short, for models that can't compute a prompt's last token twice.

vLLM's decode instance computes at least one token of a prompt itself, to have something to sample from. Where all
blocks of a prompt stay that is its last token once more, over KV that is there already. A state, however, would take
it in twice, and of a window the block may be gone that it looks back at. So there prefill computes all but the last
token, and decode that one, as vLLM's own connectors do it.
"""

from __future__ import annotations

from typing import Any


def leave_last_token(request: Any, hash_size: int) -> bool:
    """Take the last token away from a new prefill request, if it can be spared; say whether it was.

    Not of prompts of one token or given as embeddings, and not where vLLM wants the prompt's logprobs. A hash of the
    request is of ``hash_size`` tokens.
    """
    if not request.prompt_token_ids or request.num_prompt_tokens < 2 or _wants_all(request):
        return False
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    del request.block_hashes[request.num_prompt_tokens // hash_size :]
    request.max_tokens = 1
    return True


def _wants_all(request: Any) -> bool:
    skips = getattr(request, "get_skip_reading_prefix_cache", None)
    return bool(skips is not None and skips())
