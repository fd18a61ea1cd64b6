"""SGLang: prefill and decode get the same request at once, and find each other by the bootstrap room in it.

A room is used once: a second request with it crashes both engines, so every attempt draws new ones. A decode that gets
a request without a room dies, so none is ever sent. Of a request with ``n`` above 1 SGLang itself makes several with
one room, so that is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack

import msgspec

from p2pkv.message_types import worked_out
from p2pkv_proxy.bodies import error_body
from p2pkv_proxy.call import AnsweredError, Call, InstanceError, Interrupt, Pair
from p2pkv_proxy.engines import Engines, Post
from p2pkv_proxy.prompts import Body, Json
from p2pkv_proxy.protocols.base import Answer, Protocol
from p2pkv_proxy.relaying import Client, Relay
from p2pkv_proxy.tracked import Tracked

_ONE_SAMPLE = (
    "n must be 1: SGLang's prefill and decode servers give one answer a prompt; send the request n times"
)
_BLAME_S = 0.25
"""For a prefill to say what went wrong there when its decode has failed: often it is the cause."""


class SGLang(Protocol):
    """The same body to both, with a fresh room for each prompt."""

    async def open(
        self, engines: Engines, call: Call, pair: Pair, undo: AsyncExitStack, interrupt: Interrupt
    ) -> Answer:
        if pair.prefill is None:
            return await _open_alone(engines, call, pair.decode, undo, interrupt)
        if call.prompt.n_samples > 1:
            raise AnsweredError(400, "application/json", error_body(400, _ONE_SAMPLE))
        fields = call.body | bootstrap_fields(pair.prefill, call.prompt.batch)
        body = _body(call, fields, pair.prefill)
        prefill = _Prefill(engines, call, pair.prefill, body, interrupt)
        undo.push_async_callback(prefill.cancel)
        if pair.prefill.instance.dp_rank is not None:
            fields["disagg_prefill_dp_rank"] = pair.prefill.instance.dp_rank
        body = _body(call, fields, pair.decode)
        post = await undo.enter_async_context(engines.post(pair.decode, call, body, interrupt))
        decoding = asyncio.ensure_future(post.send())
        undo.callback(decoding.cancel)
        await asyncio.wait({prefill.task, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.has_failed() and not decoding.done():
            prefill.task.result()  # raises: the decode would wait for pages that never come
        try:
            await decoding
        except InstanceError:
            await prefill.blame()
            raise
        if call.path == "/generate" and call.body.get("return_logprob"):
            return _MergedAnswer(post, prefill, is_stream=call.prompt.is_stream)
        return _PairAnswer(post, prefill, is_stream=call.prompt.is_stream)


async def _open_alone(
    engines: Engines, call: Call, decode: Tracked, undo: AsyncExitStack, interrupt: Interrupt
) -> Answer:
    post = await undo.enter_async_context(
        engines.post(decode, call, _body(call, call.body, decode), interrupt)
    )
    await post.send()
    return Answer(post, is_stream=call.prompt.is_stream)


def _body(call: Call, fields: Body, tracked: Tracked) -> bytes:
    """Return the body for an instance. Of ``/generate`` the rank is taken from it; otherwise from a header."""
    rank = tracked.instance.dp_rank
    if rank is not None and call.path == "/generate":
        fields = fields | {"routed_dp_rank": rank}
    return msgspec.json.encode(fields)


def bootstrap_fields(prefill: Tracked, batch: int | None) -> Body:
    """Return the fields by which both find each other: a value each, or lists for a batch of prompts."""
    host = prefill.instance.bootstrap_host or prefill.instance.host
    port = prefill.instance.bootstrap_port
    if batch is None:
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(63)}
    return {
        "bootstrap_host": [host] * batch,
        "bootstrap_port": [port] * batch,
        "bootstrap_room": [secrets.randbits(63) for _ in range(batch)],
    }


class _Prefill:
    """The prefill's half, read in the background: only its log-probabilities are of use."""

    def __init__(
        self, engines: Engines, call: Call, tracked: Tracked, body: bytes, interrupt: Interrupt
    ) -> None:
        self.tracked = tracked
        self._wants_logprobs = bool(call.body.get("return_logprob"))
        self.task = asyncio.ensure_future(self._run(engines, call, tracked, body, interrupt))

    async def _run(
        self, engines: Engines, call: Call, tracked: Tracked, body: bytes, interrupt: Interrupt
    ) -> bytes:
        async with engines.post(tracked, call, body, interrupt) as post:
            await post.send()
            if self._wants_logprobs:
                return await post.read()
            while await post.chunk():
                pass
            return b""

    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is not None

    async def blame(self) -> None:
        """Raise the prefill's failure, if it has one to tell."""
        await asyncio.wait({self.task}, timeout=_BLAME_S)
        if self.has_failed():
            self.task.result()

    async def cancel(self) -> None:
        """End it."""
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # was told, or the decode did without


class _PairAnswer(Answer):
    """The decode's answer, which does not come if the prefill fails before the decode's first token.

    The decode may have sent its headers by then: it would wait for pages, and be blamed when it has waited too long.
    """

    def __init__(self, post: Post, prefill: _Prefill, *, is_stream: bool) -> None:
        super().__init__(post, is_stream=is_stream)
        self._prefill = prefill
        self._has_begun = False

    async def whole(self) -> bytes:
        return await self._unless_prefill_fails(super().whole())

    async def more(self) -> bytes:
        if self._has_begun:
            return await super().more()
        first = await self._unless_prefill_fails(super().more())
        self._has_begun = True
        return first

    async def _unless_prefill_fails(self, answer: Coroutine[object, object, bytes]) -> bytes:
        decoding = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({self._prefill.task, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if self._prefill.has_failed() and not decoding.done():
                self._prefill.task.result()
            return await decoding
        finally:
            decoding.cancel()
            await asyncio.wait({decoding})
            if not decoding.cancelled():
                decoding.exception()  # was raised above, or the prefill's was


class _MergedAnswer(_PairAnswer):
    """Prepends the prefill's log-probabilities of the prompt, which the decode doesn't have."""

    _prompts: list[list[object]] | None = None

    async def whole(self) -> bytes:
        return self._merged(await super().whole(), await self._logprobs())

    async def more(self) -> bytes:
        if self._prompts is None:
            self._prompts = await self._logprobs()
        events = await super().more()
        merged = [self._merged_event(event, self._prompts) for event in events.split(b"\n\n") if event]
        return b"".join(event + b"\n\n" for event in merged)

    async def pass_on(self, relay: Relay, client: Client) -> None:
        """Do nothing: every event is changed."""

    def _merged_event(self, event: bytes, logprobs: list[list[object]]) -> bytes:
        return b"data: " + self._merged(event[6:], logprobs) if event.startswith(b"data: {") else event

    def _merged(self, raw: bytes, logprobs: list[list[object]]) -> bytes:
        try:
            return _merged(raw, logprobs)
        except msgspec.DecodeError:
            raise self.post.blame("answered with what is no JSON") from None

    async def _logprobs(self) -> list[list[object]]:
        """Return the prompt's log-probabilities, one list a prompt."""
        try:
            raw = await asyncio.shield(self._prefill.task)
        except AnsweredError as error:
            raise InstanceError(self.post.tracked, f"went on without its prefill: {error}") from error
        first = raw.removeprefix(b"data: ").split(b"\n\n", 1)[0]
        try:
            answers = msgspec.json.decode(first, type=_LogprobsAnswer | list[_LogprobsAnswer])
        except msgspec.DecodeError as error:
            raise InstanceError(
                self._prefill.tracked, f"answered without log-probabilities that can be read: {error}"
            ) from error
        return [
            answer.meta_info.input_token_logprobs or []
            for answer in (answers if isinstance(answers, list) else [answers])
        ]


class _LogprobsMeta(msgspec.Struct):
    input_token_logprobs: list[object] | None = None


@worked_out
class _LogprobsAnswer(msgspec.Struct):
    meta_info: _LogprobsMeta = msgspec.field(default_factory=_LogprobsMeta)


def _merged(raw: bytes, logprobs: list[list[object]]) -> bytes:
    answer: Json = msgspec.json.decode(raw)
    for index, one in enumerate(answer if isinstance(answer, list) else [answer]):
        meta = one.get("meta_info") if isinstance(one, Mapping) else None
        place = one.get("index", index) if isinstance(one, Mapping) else index
        if isinstance(meta, dict) and isinstance(place, int) and place < len(logprobs):
            own = meta.get("input_token_logprobs")
            meta["input_token_logprobs"] = [*logprobs[place], *(own if isinstance(own, list) else [])]  # type: ignore[list-item]
    return msgspec.json.encode(answer)
