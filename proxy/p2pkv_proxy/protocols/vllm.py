"""vLLM: the prefill computes the prompt and one token; what it says of its KV goes with the request to the decode.

The same way serves every engine that shares its pages through p2pkv: then the decode finds them by their keys, and
``kv_transfer_params`` may be empty.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec

from p2pkv.instances.page_report import FIELD
from p2pkv.message_types import worked_out
from p2pkv_proxy.call import Call, Interrupt, Pair
from p2pkv_proxy.engines import Engines, Post
from p2pkv_proxy.prompts import Body, Json
from p2pkv_proxy.protocols.base import Answer, Protocol

_ASK: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_FOR_PREFILL = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "return_token_ids",
    }
)


class VLLM(Protocol):
    """``kv_transfer_params`` in the body."""

    async def open(
        self, engines: Engines, call: Call, pair: Pair, undo: AsyncExitStack, interrupt: Interrupt
    ) -> Answer:
        call = self.named(call, pair)
        body = call.body
        pages: object = None
        if pair.prefill is not None:
            async with engines.post(pair.prefill, call, _prefill_body(body), interrupt) as prefill:
                await prefill.send()
                params = _params(prefill, await prefill.read())
            if params is not None:
                pages = params.pop(FIELD, None)
                body = body | {"kv_transfer_params": params}  # type: ignore[assignment]
        post = await undo.enter_async_context(
            engines.post(pair.decode, call, msgspec.json.encode(body), interrupt)
        )
        await post.send()
        answer = Answer(post, is_stream=call.prompt.is_stream)
        answer.pages = pages
        return answer

    def named(self, call: Call, pair: Pair) -> Call:
        """Give the request the id that the pair's connectors want."""
        return call


class VLLMAddresses(VLLM):
    """Both KV addresses in the request id, for connectors that take them from there."""

    def named(self, call: Call, pair: Pair) -> Call:
        if pair.prefill is None:
            return call
        addresses = pair.prefill.instance.kv_address, pair.decode.instance.kv_address
        unique = call.request_id.replace("-", "")
        name = f"___prefill_addr_{addresses[0]}___decode_addr_{addresses[1]}_{unique}"
        return replace(call, request_id=name)


def _prefill_body(body: Body) -> bytes:
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return msgspec.json.encode({**kept, limit: 1, "stream": False, "kv_transfer_params": _ASK})


@worked_out
class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, object] | None = None


def _params(post: Post, raw: bytes) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(raw, type=_Prefilled).kv_transfer_params
    except msgspec.DecodeError as error:
        raise post.blame(f"gave an answer that can't be read: {error}") from error
