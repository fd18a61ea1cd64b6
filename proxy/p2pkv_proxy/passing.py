"""What the router does not take part in: embeddings, responses, tokenizers and the like go to one instance as they are.

Of a body only what engines would take for a router's word is left out. Nothing of the answer is changed.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from p2pkv_proxy.bodies import Scope
from p2pkv_proxy.call import Call, Interrupt, Pair
from p2pkv_proxy.engines import Engines, Post
from p2pkv_proxy.prompts import BYTES_A_TOKEN, Prompt
from p2pkv_proxy.protocols.base import HOP_BY_HOP, ROUTERS_FIELDS, Answer, Protocol
from p2pkv_proxy.reading import for_engines
from p2pkv_proxy.relaying import Client, Relay

PASSED = frozenset(
    {
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
    }
)
"""Endpoints of vLLM and SGLang that compute something and change nothing, so that another instance may be asked too."""
_FOR_ANY = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"})
"""Of these a tokenizer is enough. Others would have SGLang's decodes wait for a prefill, or end."""
METHODS = frozenset({"GET", "POST"})


def read_passed(scope: Scope, raw: bytes, authorization: bytes | None) -> Call:
    """Make a call of a request that is passed on as it is."""
    headers, request_id = for_engines(scope, authorization)
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), None)
    if kind is not None:
        headers.append((b"content-type", kind))
    model, is_stream = "", False
    if raw.lstrip()[:1] == b"{":
        try:
            body = msgspec.json.decode(
                raw, type=dict[str, msgspec.Raw]
            )  # of millions of numbers none is made
            said = {name: msgspec.json.decode(body[name]) for name in ("model", "stream") if name in body}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body, said = {}, {}  # the engine says what is wrong with it
        model = found if isinstance(found := said.get("model"), str) else ""
        is_stream = said.get("stream") is True
        if any(name in body for name in ROUTERS_FIELDS):
            raw = msgspec.json.encode({name: body[name] for name in body if name not in ROUTERS_FIELDS})
    # as it came: decoded it might have the end of a line in it
    path = scope["raw_path"].decode("latin-1")
    if query := scope["query_string"].decode("latin-1"):
        path = f"{path}?{query}"
    n_tokens = len(raw) // BYTES_A_TOKEN
    prompt = Prompt(model, [], None, is_stream=is_stream, max_tokens=0, n_tokens=n_tokens)
    prompt.is_for_one = True
    prompt.needs_whole_engine = scope["path"] not in _FOR_ANY
    return Call(path, {}, prompt, headers, request_id, method=scope["method"], raw=raw)


class Passing(Protocol):
    """One instance gets what the client has sent."""

    async def open(
        self, engines: Engines, call: Call, pair: Pair, undo: AsyncExitStack, interrupt: Interrupt
    ) -> Answer:
        assert call.raw is not None
        post = await undo.enter_async_context(engines.post(pair.decode, call, call.raw, interrupt))
        return _PassedAnswer(post, await post.send())


class _PassedAnswer(Answer):
    """An answer of any kind, in the parts that it comes in. Its end is that of the body."""

    says_errors = False

    def __init__(self, post: Post, status: int) -> None:
        self.post = post
        self.status = status
        self.headers = [(name, value) for name, value in post.headers if name not in HOP_BY_HOP]
        self.is_stream = True
        self.pages = None

    async def more(self) -> bytes:
        chunk = await self.post.chunk()
        if not chunk:
            self.post.complete()
        return chunk

    async def pass_on(self, relay: Relay, client: Client) -> None:
        """Do nothing: it has no events whose end the relay would know."""
