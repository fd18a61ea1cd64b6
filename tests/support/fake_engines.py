"""Engines for tests of the router: real HTTP servers on this loop whose answers, deaths and tempers are the test's.

SGLang's are as touchy as the real ones: a request without a bootstrap room, or with one that was used before, ends them
(``crashed`` says why).
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fake_answers import FIRST_ID, Stream, ids_of, stop_of, tokens_of
from listening import Listening
from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from p2pkv.instances.page_report import FIELD

if TYPE_CHECKING:
    from typing_extensions import Self

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


MOODS = ("breaks off", "refuses", "fails", "hangs", "is another service", "never ends")
"""What an engine that misbehaves does with a request."""
FAILURE = b'{"error": "the engine has failed, as it was told to"}'
"""Its own words with status 500."""
TOLD_TO = "as it was told to"
"""In what an engine raises, and logs, since the test wants it so."""


_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
_STREAM_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


class FakeEngine:
    """One engine. Attributes below ``requests`` may be set at any time."""

    def __init__(
        self,
        role: Role,
        mode: Mode = Mode.VLLM,
        rooms: dict[int, asyncio.Event] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.role = role
        self.mode = mode
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.n_cancelled = 0
        self.crashed = ""
        self.gate = asyncio.Event()
        """Cleared: it takes requests and says nothing."""
        self.gate.set()
        self.token_gate = asyncio.Semaphore(1_000_000)
        """Taken once a token."""
        self.refusal: tuple[int, bytes] | None = None
        self.die_after: int | None = None
        """Tokens of one answer, after which the connection is cut."""
        self.mood: Callable[[], str] = lambda: ""
        """Drawn for each request: one of :data:`MOODS`, or "" for an answer as it should be."""
        self.pieces: Callable[[bytes], list[bytes]] = lambda event: [event]
        """How it cuts an event of a stream."""
        self.burst: Callable[[], int] = lambda: 1
        """Tokens of its next event."""
        self.breaks: Callable[[], str] = lambda: ""
        """Drawn before each event of a stream: "cut" ends the connection, "error" is said in an event, as vLLM does,
        and "stall" says nothing any more, as one does that was stopped."""
        self.lags = False
        """Of every fourth token nothing is said before the next one, as of characters that take two; and what was
        held back is lost where a prompt ends within one."""
        self.tells_tokens = True
        """As engines do that know ``return_token_ids``."""
        self.differs = False
        """It generates other tokens behind those that it is given."""
        self.stops = False
        """Answers may end by themselves."""
        self.sends_head_early = False
        """A decode's stream has headers before its prefill has said anything."""
        self.pages: Callable[[str], object] = lambda prompt: None
        """What a vLLM prefill says of a prompt's pages."""
        self.garbage: bytes | None = None
        """What it answers in place of JSON."""
        self.is_healthy = True
        self.capacity = 0
        self.kv_address = ""
        self.model = ""
        self.passed: list[tuple[str, bytes]] = []
        """Path and body of what was asked of other endpoints."""
        self.passed_headers: list[dict[str, str]] = []
        """Of all that was asked there, whatever became of it."""
        self.asked: list[tuple[str, str]] = []
        """Path and key of each page that was asked for, but for its health."""
        self._rooms = rooms if rooms is not None else {}
        self._used: set[int] = set()
        self._listening = Listening(self, lifespan="off", tls=tls)

    async def __aenter__(self) -> Self:
        await self._listening.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.gate.set()
        await self._listening.__aexit__(*exc_info)

    def kill(self) -> None:
        """End as a killed process does."""
        self._listening.kill()

    @property
    def instance(self) -> Instance:
        """How a router knows it."""
        return checked(
            Instance(
                url=self._listening.url,
                role=self.role,
                mode=self.mode,
                capacity=self.capacity,
                kv_address=self.kv_address,
                model=self.model,
                bootstrap_port=8998 if self.role is Role.PREFILL else None,
            )
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer as an engine does."""
        if scope["path"] == "/health":
            await _whole(send, 200 if self.is_healthy else 503, b"")
            return
        if scope["method"] == "GET":
            headers = dict(scope["headers"])
            self.asked.append((scope["path"], headers.get(b"authorization", b"").decode()))
            await _whole(send, 200, b"{}")
            return
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        else:
            return  # whoever asked has gone before the end of the request
        if scope["path"] not in _GENERATING:
            await self._pass(scope, raw, send)
            return
        body = json.loads(raw)
        self.requests.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        gone = asyncio.ensure_future(_gone(receive))
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answering.done():
            answering.cancel()
            self.n_cancelled += 1
            return
        answering.result()

    async def _pass(self, scope: MutableMapping[str, Any], raw: bytes, send: Send) -> None:
        """Say what was asked, in two pieces."""
        self.passed_headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await self.gate.wait()
        if (mood := self.mood()) in ("refuses", "hangs"):
            await self._misbehave(mood, send)
            return
        if self.mode is Mode.SGLANG and self.role is not Role.BOTH and "tokenize" not in scope["path"]:
            self.crashed = f"{scope['path']} without a bootstrap room"
        if self.refusal is not None:
            await _whole(send, *self.refusal)
            return
        self.passed.append((scope["path"], raw))
        path = (scope["raw_path"] + b"?" + scope["query_string"]).decode()
        kind = dict(scope["headers"]).get(b"content-type", b"").decode()
        said = json.dumps({"path": path, "kind": kind, "body": raw.decode()}).encode()
        headers = [(b"content-type", b"application/x-own")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": said[:7], "more_body": True})
        if how := self.breaks():
            await self._break(how, send)
            return
        await send({"type": "http.response.body", "body": said[7:]})

    async def _answer(self, scope: MutableMapping[str, Any], body: dict[str, Any], send: Send) -> None:
        await self.gate.wait()
        if mood := self.mood():
            await self._misbehave(mood, send)
            return
        if self.refusal is not None:
            await _whole(send, *self.refusal)
            return
        if self.garbage is not None:
            await self._meet(body)
            await _whole(send, 200, self.garbage)
            return
        if FIELD in (body.get("kv_transfer_params") or {}):
            self.crashed = "a report of pages, which is the router's"
        if self.sends_head_early:
            await send(_STREAM_HEAD)
        if self.mode is Mode.SGLANG and self.role is not Role.BOTH:
            await self._meet(body)
        prompt = body.get("prompt", body.get("messages", body.get("text", body.get("input_ids"))))
        n = body.get("max_tokens", (body.get("sampling_params") or {}).get("max_new_tokens", 4))
        first, prompt = self._continued(prompt)
        if self.stops:
            n = max(0, min(n, stop_of(prompt) - first))
        tokens = tokens_of(prompt, first + n)
        if body.get("stream"):
            await self._stream(Stream(scope["path"], prompt, tokens, first, differs=self.differs), body, send)
            return
        answer: dict[str, Any] = {"choices": [{"index": 0, "text": "".join(tokens)}]}
        if scope["path"] == "/generate":
            answer = {"text": "".join(tokens), "meta_info": self._meta()}
        if self.mode is Mode.VLLM and self.role is Role.PREFILL:
            answer["kv_transfer_params"] = {"remote_block_ids": [1, 2, 3]}
            if (pages := self.pages(str(prompt))) is not None:
                answer["kv_transfer_params"][FIELD] = pages
        await _whole(send, 200, json.dumps(answer).encode())

    async def _misbehave(self, mood: str, send: Send) -> None:
        if mood == "refuses":
            await _whole(send, 404, b'{"error": "no such model"}')
            return
        if mood == "fails":
            await _whole(send, 500, FAILURE)
            return
        if mood == "hangs":
            await asyncio.Event().wait()
        kind = b"text/html" if mood == "is another service" else b"text/event-stream"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        await send(start)
        if mood == "breaks off":
            event = b'data: {"choices": [{"index": 0, "text": ""}]}\n\n'
            await send({"type": "http.response.body", "body": event, "more_body": True})
            raise ConnectionError(f"the engine breaks off, {TOLD_TO}")
        while mood == "never ends":
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)  # to whoever has hung up it is sent without a wait
        await send({"type": "http.response.body", "body": b"<html>"})

    def _meta(self) -> dict[str, Any]:
        return {"input_token_logprobs": [[-1.0, 1, None]] if self.role is Role.PREFILL else [[-2.0, 2, None]]}

    async def _meet(self, body: dict[str, Any]) -> None:
        """Wait for the other half of the pair."""
        if not body.get("bootstrap_host") or body.get("bootstrap_room") is None:
            self.crashed = "a request without a bootstrap room"
            self.kill()
            raise asyncio.CancelledError
        rooms = body["bootstrap_room"]
        for room in rooms if isinstance(rooms, list) else [rooms]:
            if room in self._used:
                self.crashed = f"room {room} was used before"
            self._used.add(room)
            event = self._rooms.setdefault(room, asyncio.Event())
            if self.role is Role.PREFILL:
                event.set()
            await event.wait()

    def _continued(self, prompt: object) -> tuple[int, object]:
        """Return how many tokens of an answer are in a prompt, and what that is an answer to."""
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            return 0, prompt
        n_given = next((i for i, token in enumerate(prompt) if token >= FIRST_ID), len(prompt))
        ids = prompt[n_given:]
        asked: object = prompt[:n_given]
        with suppress(ValueError):
            asked = json.loads(bytes(prompt[:n_given]))
        if n_given == 0:
            return 0, prompt
        if ids != ids_of(asked, len(ids)):
            self.crashed = f"tokens that nobody has generated: {ids}"
        return len(ids), asked

    async def _stream(self, stream: Stream, body: dict[str, Any], send: Send) -> None:
        if not self.sends_head_early:
            await send(_STREAM_HEAD)
        is_told = self.tells_tokens and bool(body.get("return_token_ids"))
        if stream.is_chat:
            await self._send_event(_event(stream.beginning(is_told=is_told)), send)
        n = len(stream.tokens)
        at = first = stream.first
        while at < n:
            if at - first == self.die_after:
                self.kill()
                return
            if how := self.breaks():
                await self._break(how, send)
                return
            end = min(n, at + self.burst())
            for _ in range(at, end):
                await self.token_gate.acquire()
            answer = stream.event(at, end, lags=self.lags, is_told=is_told)
            if end == n:
                answer["choices"][0]["finish_reason"] = (
                    "stop" if self.stops and end == stop_of(stream.prompt) else "length"
                )
            answer["meta_info"] = self._meta()
            await self._send_event(_event(answer), send)
            at = end
        if how := self.breaks():
            await self._break(how, send)
            return
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._send_event(_event({**stream.head, "choices": [], "usage": stream.usage}), send)
        await self._send_event(b"data: [DONE]\n\n", send)
        await send({"type": "http.response.body", "body": b""})

    def freeze(self) -> None:
        """Say nothing any more, as a stopped process does, but that its health is bad."""
        self.is_healthy = False
        self.gate.clear()
        self.breaks = lambda: "stall"

    async def _break(self, how: str, send: Send) -> None:
        if how == "stall":
            await asyncio.Event().wait()
        if how == "error":
            await self._send_event(_event({"error": {"message": "the engine is dead", "code": 500}}), send)
            await self._send_event(b"data: [DONE]\n\n", send)
            await send({"type": "http.response.body", "body": b""})
            return
        raise ConnectionError(f"the engine breaks off, {TOLD_TO}")

    async def _send_event(self, event: bytes, send: Send) -> None:
        for number, piece in enumerate(self.pieces(event)):
            if number:
                await asyncio.sleep(0)  # what was sent before leaves by itself
            await send({"type": "http.response.body", "body": piece, "more_body": True})


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
