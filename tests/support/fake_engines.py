"""Engines for tests of the router: real HTTP servers on this loop whose answers, deaths and tempers are the test's.

What an engine generates follows from the prompt alone, so that a test can tell a wrong token. SGLang's are as touchy as
the real ones: a request without a bootstrap room, or with one that was used before, ends them (``crashed`` says why).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from p2pkv.instances.page_report import FIELD, report_of

if TYPE_CHECKING:
    from typing_extensions import Self

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


MOODS = ("breaks off", "refuses", "hangs", "is another service", "never ends")
"""What an engine that misbehaves does with a request."""


def tokens_of(prompt: object, n: int) -> list[str]:
    """What any engine generates behind a prompt."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [f"{digest[i % 64]}{i} " for i in range(n)]


_FIRST_ID = 256
"""Ids below are bytes of prompts; of the others each is of one token at one place."""
_STOPPING = 61
"""Prompts that end by themselves do so within so many tokens."""


def ids_of(prompt: object, n: int) -> list[int]:
    """The ids of the tokens that any engine generates behind a prompt."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [_FIRST_ID + 16 * i + int(digest[i % 64], 16) for i in range(n)]


def prompt_ids(prompt: object) -> list[int]:
    """A prompt's tokens: its own, or the bytes of its JSON."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return list(json.dumps(prompt).encode())


def stop_of(prompt: object) -> int:
    """Behind so many tokens an answer ends by itself, where engines stop."""
    return int(hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:6], 16) % _STOPPING + 1


_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
PAGE_BYTES = 64


def page_names(prompt: str) -> list[bytes]:
    """How engines name the pages of a prompt, of 64 bytes each and 16 tokens: each name covers all before it."""
    data, names, digest = prompt.encode(), [], b""
    for first in range(0, len(data) - PAGE_BYTES + 1, PAGE_BYTES):
        digest = hashlib.blake2b(digest + data[first : first + PAGE_BYTES], digest_size=16).digest()
        names.append(digest)
    return names


def honest_pages(prompt: str) -> dict[str, object]:
    """What an engine says of a prompt's pages that tells the truth."""
    return report_of("n", page_names(prompt), page_size=16, n_tokens=len(prompt.encode()) // 4 + 1)


_STREAM_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


class Listening:
    """A uvicorn server on this loop and a port of its own."""

    def __init__(self, app: Any, *, tls: ssl.SSLContext | None = None, **options: Any) -> None:
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", **options)
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        self.server.config.load()
        self.server.config.ssl = self._tls
        self.server.lifespan = self.server.config.lifespan_class(self.server.config)
        await self.server.startup(sockets=[self._socket])
        return self

    def kill(self) -> None:
        """Cut every connection and listen no more, as a killed process does."""
        for server in self.server.servers:
            server.close()
        self._socket.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()
        for task in list(self.server.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)
        await self.server.lifespan.shutdown()


class _Stream:
    """One answer in events. ``tokens`` are all from the first on, of which ``first`` are in the prompt."""

    def __init__(self, path: str, prompt: object, tokens: list[str], first: int, *, differs: bool) -> None:
        self.is_chat = path == "/v1/chat/completions"
        self.prompt = prompt
        self.tokens = tokens
        self.first = first
        self._ids = ids_of(prompt, len(tokens))
        if differs:
            self.tokens, self._ids = (
                tokens[:first] + tokens[first:][::-1],
                self._ids[:first] + self._ids[first:][::-1],
            )
        self._given = prompt_ids(prompt) + self._ids[:first]
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        self.head = {"id": f"cmpl-{secrets.token_hex(8)}", "object": kind}

    @property
    def usage(self) -> dict[str, int]:
        n_prompt, n_new = len(self._given), len(self.tokens) - self.first
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}

    def beginning(self, *, is_told: bool) -> dict[str, Any]:
        """A chat's first event, which says whose answer it is."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        return {**self.head, "choices": [choice]} | ({"prompt_token_ids": self._given} if is_told else {})

    def event(self, at: int, end: int, *, lags: bool, is_told: bool) -> dict[str, Any]:
        """Tokens from ``at`` to ``end``."""
        begin, until = at, end
        if lags:
            while begin > self.first and self._is_held(begin - 1):
                begin -= 1
            while until > begin and self._is_held(until - 1):
                until -= 1
        text = "".join(self.tokens[begin:until])
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if is_told:
            choice["token_ids"] = self._ids[at:end]
            if at == self.first and not self.is_chat:
                choice["prompt_token_ids"] = self._given
        return {**self.head, "choices": [choice]}

    def _is_held(self, i: int) -> bool:
        return i < len(self.tokens) - 1 and self._ids[i] % 4 == 0


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
        """Drawn before each event of a stream: "cut" ends the connection, "error" is said in an event, as vLLM does."""
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
        await self.gate.wait()
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
            await self._stream(
                _Stream(scope["path"], prompt, tokens, first, differs=self.differs), body, send
            )
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
        if mood == "hangs":
            await asyncio.Event().wait()
        kind = b"text/html" if mood == "is another service" else b"text/event-stream"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        await send(start)
        if mood == "breaks off":
            event = b'data: {"choices": [{"index": 0, "text": ""}]}\n\n'
            await send({"type": "http.response.body", "body": event, "more_body": True})
            raise ConnectionError("the engine breaks off, as it was told to")
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
        n_given = next((i for i, token in enumerate(prompt) if token >= _FIRST_ID), len(prompt))
        ids = prompt[n_given:]
        asked: object = prompt[:n_given]
        with suppress(ValueError):
            asked = json.loads(bytes(prompt[:n_given]))
        if n_given == 0:
            return 0, prompt
        if ids != ids_of(asked, len(ids)):
            self.crashed = f"tokens that nobody has generated: {ids}"
        return len(ids), asked

    async def _stream(self, stream: _Stream, body: dict[str, Any], send: Send) -> None:
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

    async def _break(self, how: str, send: Send) -> None:
        if how == "error":
            await self._send_event(_event({"error": {"message": "the engine is dead", "code": 500}}), send)
            await self._send_event(b"data: [DONE]\n\n", send)
            await send({"type": "http.response.body", "body": b""})
            return
        raise ConnectionError("the engine breaks off, as it was told to")

    async def _send_event(self, event: bytes, send: Send) -> None:
        for number, piece in enumerate(self.pieces(event)):
            if number:
                await asyncio.sleep(0)  # what was sent before leaves by itself
            await send({"type": "http.response.body", "body": piece, "more_body": True})


class Rig(AsyncExitStack):
    """Engines and a router before them, all on this loop."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: dict[int, asyncio.Event] = {}

    async def engine(
        self, role: Role, mode: Mode = Mode.VLLM, *, tls: ssl.SSLContext | None = None, **attributes: Any
    ) -> FakeEngine:
        """Start one more."""
        engine = FakeEngine(role, mode, self.rooms, tls)
        for name, value in attributes.items():
            assert hasattr(engine, name)
            setattr(engine, name, value)
        await self.enter_async_context(engine)
        return engine

    async def serve(self, app: Any, **options: Any) -> Listening:
        """Serve an ASGI application."""
        return await self.enter_async_context(Listening(app, **options))


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
