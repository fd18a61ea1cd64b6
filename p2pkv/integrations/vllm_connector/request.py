"""What the connector relies on of a request of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Tables = Sequence[Sequence[int]]
"""The blocks of a request, by group."""


class Request(Protocol):
    """The part of vLLM's request that is relied on."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None
    kv_hints: Any
    status: Any
    lora_request: Any
    mm_features: Sequence[Any]


def beside_tokens(request: Request) -> list[str]:
    """Return what a prompt's KV depends on besides its tokens."""
    lora = request.lora_request
    named = [] if lora is None else [f"lora {lora.lora_name} {lora.lora_path}"]
    return named + [f"input {feature.identifier}" for feature in request.mm_features]
