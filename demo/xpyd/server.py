"""An OpenAI-compatible endpoint before the demo's engine: one instance of the xPyD demo.

    python -m demo.xpyd.server --role prefill --node-id prefill-0 --join HOST:PORT --router HOST:PORT

Prints one line of JSON when it listens, and ends when its standard input does. A prefill is asked with
``kv_transfer_params.do_remote_decode``: it makes the prompt's pages fetchable and generates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from demo.model import PAGE, Model, Shape, Tokens, decode, encode
from demo.node_store import NodeStore
from demo.paged_kv import PagedKV, page_keys
from demo.xpyd.scheduler import Ending, Job, Scheduler
from demo.xpyd.waiting import WaitingModel
from p2pkv import Config, Node
from p2pkv.control.secret import cluster_keys
from p2pkv.exposition import Exposition
from p2pkv.instances.heartbeat import Heart, Instance, Load, Mode, Role, State
from p2pkv.instances.page_report import FIELD, report_of
from p2pkv.metrics import Metrics

MODEL = "demo"
SHAPE = Shape(n_layers=2, width=64, n_heads=4, max_tokens=4096)
"""Small: a page of a short prompt takes half a millisecond, so that many requests fit a few cores."""
N_PAGES = 4096
POOL_SIZE = "64MiB"


class BadRequestError(ValueError):
    """The message goes to the client."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for."""

    prompt: Tokens
    n_new: int
    is_stream: bool
    is_chat: bool
    is_prefill: bool
    tells_ids: bool = False
    """Which tokens the prompt and the answer are made of, as vLLM's ``return_token_ids``."""
    tells_usage: bool = False


class Endpoint:
    """The routes of one instance; the scheduler is the caller's."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._exposition = Exposition(metrics)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/stats", self._stats),
                Route("/metrics", self._metrics),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        try:
            wanted = _read(await request.body(), is_chat=is_chat)
        except BadRequestError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        tokens: asyncio.Queue[int | Ending] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: int | Ending) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, item)

        job = Job(wanted.prompt, wanted.n_new, put, put)
        self._scheduler.submit(job)
        if wanted.is_stream:
            return StreamingResponse(_events(job, wanted, tokens), media_type="text/event-stream")
        return await self._whole(request, job, wanted, tokens)

    async def _whole(
        self, request: Request, job: Job, wanted: Wanted, tokens: asyncio.Queue[int | Ending]
    ) -> Response:
        collecting = asyncio.ensure_future(_collect(tokens))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            job.is_cancelled = not collecting.done()
        if not collecting.done():
            collecting.cancel()
            return Response(status_code=499)
        generated, ending = collecting.result()
        if ending is not Ending.DONE:
            return JSONResponse({"error": {"message": f"the request was {ending.value}"}}, 500)
        text = decode(generated).decode(errors="replace")
        body = _body(wanted, text, "length") | {"usage": _usage(job, len(generated))}
        if wanted.is_prefill:
            names = [key.encode() for key in page_keys(job.prompt, PAGE)]
            pages = report_of(namespace(), names, page_size=PAGE, n_tokens=len(job.prompt))
            body["kv_transfer_params"] = {"do_remote_prefill": True, FIELD: pages}
        return JSONResponse(body)

    async def _models(self, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "p2pkv"}]}
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        kind, text = self._exposition.write(request.headers.get("accept", ""))
        return Response(text, media_type=kind)

    async def _stats(self, request: Request) -> Response:
        running, waiting = self._scheduler.load
        return JSONResponse(
            {
                "running": running,
                "waiting": waiting,
                "reused_tokens": self._scheduler.n_reused,
                "computed_tokens": self._scheduler.n_computed,
            }
        )


def _read(raw: bytes, *, is_chat: bool) -> Wanted:
    try:
        body = json.loads(raw)
        if is_chat:
            lines = [f"{message['role']}: {message['content']}\n" for message in body["messages"]]
            prompt: str | Tokens = "".join(lines) + "assistant:"
        else:
            prompt = body["prompt"]
        n_new = body.get("max_completion_tokens", body.get("max_tokens", 16))
        tokens = encode(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
        params = body.get("kv_transfer_params") or {}
        is_prefill = bool(params.get("do_remote_decode"))
        is_stream = bool(body.get("stream"))
        tells_ids = bool(body.get("return_token_ids"))
        tells_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequestError(f"the request can't be read: {error!r}") from error
    if not tokens or not all(0 <= token <= 256 for token in tokens):
        raise BadRequestError("a prompt has at least one token, and tokens are 0 to 256")
    if not isinstance(n_new, int) or n_new < 1 or len(tokens) + n_new > SHAPE.max_tokens:
        raise BadRequestError(f"prompt and max_tokens are {SHAPE.max_tokens} tokens at most")
    n_wanted = 0 if is_prefill else n_new
    return Wanted(tokens, n_wanted, is_stream, is_chat, is_prefill, tells_ids, tells_usage)


async def _collect(tokens: asyncio.Queue[int | Ending]) -> tuple[Tokens, Ending]:
    generated: Tokens = []
    while not isinstance(item := await tokens.get(), Ending):
        generated.append(item)
    return generated, item


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(job: Job, wanted: Wanted, tokens: asyncio.Queue[int | Ending]) -> AsyncIterator[bytes]:
    prompt = {"prompt_token_ids": wanted.prompt} if wanted.tells_ids else {}
    try:
        n_left = wanted.n_new
        while not isinstance(item := await tokens.get(), Ending):
            n_left -= 1
            text = decode([item]).decode(errors="replace")
            body = _body(wanted, text, None if n_left else "length")
            if wanted.tells_ids:
                body["choices"][0] |= {"token_ids": [item]} | ({} if wanted.is_chat else prompt)
                body |= prompt if wanted.is_chat else {}
                prompt = {}
            yield b"data: " + json.dumps(body).encode() + b"\n\n"
        if item is not Ending.DONE:
            error = {"error": {"message": f"the request was {item.value}", "code": 500}}
            yield b"data: " + json.dumps(error).encode() + b"\n\n"
        else:
            if wanted.tells_usage:
                usage = {**_body(wanted, "", None), "choices": [], "usage": _usage(job, wanted.n_new)}
                yield b"data: " + json.dumps(usage).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
    finally:
        job.is_cancelled = True


def _usage(job: Job, n_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": len(job.prompt),
        "completion_tokens": n_generated,
        "total_tokens": len(job.prompt) + n_generated,
        "prompt_tokens_details": {"cached_tokens": job.n_reused},
    }


def _body(wanted: Wanted, text: str, finish_reason: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if not wanted.is_chat:
        kind, choice["text"] = "text_completion", text
    elif wanted.is_stream:
        kind, choice["delta"] = "chat.completion.chunk", {"content": text}
    else:
        kind, choice["message"] = "chat.completion", {"role": "assistant", "content": text}
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
    }


def namespace() -> str:
    """Name what makes pages of this model incompatible with others."""
    return f"demo/{SHAPE.describe()}"


def main() -> int:
    """Run an instance until its standard input ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.xpyd.server", description=__doc__)
    parser.add_argument("--role", type=Role, required=True)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT of the p2pkv node")
    parser.add_argument("--join", default="", help="HOST:PORT at which the p2pkv nodes meet")
    parser.add_argument("--router", action="append", default=[], help="HOST:PORT that takes heartbeats")
    parser.add_argument("--secret-file")
    parser.add_argument("--pool-size", default=POOL_SIZE)
    parser.add_argument("--capacity", type=int, default=0)
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="routers don't know how texts become tokens"
    )
    parser.add_argument("--no-stdin", action="store_true", help="run until a signal, as a service")
    parser.add_argument(
        "--page-seconds", type=float, default=0.0, help="wait so long for a page instead of computing it"
    )
    options = parser.parse_args()
    model = WaitingModel(SHAPE, options.page_seconds) if options.page_seconds else Model(SHAPE)
    kv = PagedKV(N_PAGES, SHAPE.page)
    with ExitStack() as undo:
        node = undo.enter_context(
            Node.start(
                Config(
                    node_id=options.node_id,
                    listen=options.listen,
                    join=options.join,
                    pool_size=options.pool_size,
                    namespace=namespace(),
                    secret_file=options.secret_file,
                )
            )
        )
        scheduler = Scheduler(model, kv, NodeStore(node, kv))
        undo.callback(scheduler.close)
        listener = undo.enter_context(socket.create_server((options.host, options.port), backlog=1024))
        url = f"http://{options.host}:{listener.getsockname()[1]}"
        instance = Instance(
            id=options.node_id,
            url=url,
            role=options.role,
            mode=Mode.VLLM,
            model=MODEL,
            capacity=options.capacity,
            node_id=node.node_id,
            namespace=namespace(),
            page_size=PAGE,
            tokenizer="" if options.no_tokenizer else "bytes",
        )
        endpoint = Endpoint(scheduler, node.metrics)
        _serve(instance, endpoint, scheduler, listener, undo, options, node.routers)
    return 0


def _serve(
    instance: Instance,
    endpoint: Endpoint,
    scheduler: Scheduler,
    listener: socket.socket,
    undo: ExitStack,
    options: argparse.Namespace,
    found: Callable[[], Sequence[str]],
) -> None:
    config = uvicorn.Config(
        endpoint.app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=30
    )
    server = uvicorn.Server(config)

    def look() -> Load:
        running, waiting = scheduler.load
        state = State.READY if server.started else State.STARTING
        return Load(State.DRAINING if server.should_exit else state, running, waiting, *scheduler.kv)

    def tell() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.01)  # uvicorn has no event for it
        keys = cluster_keys(options.secret_file)
        heart = Heart(instance, options.router or (), keys, look, interval=1.0, found=found)
        undo.callback(heart.close)
        print(json.dumps({"url": instance.url, "id": instance.id}), flush=True)
        if not options.no_stdin:
            sys.stdin.buffer.read()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, name="p2pkv-demo-tell", daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
