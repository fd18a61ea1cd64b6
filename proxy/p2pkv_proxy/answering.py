"""Passing on what a pair answers, as it comes, and following it where another pair could go on with it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial

from p2pkv_proxy.bodies import Scope
from p2pkv_proxy.call import Call, InstanceError, Pair
from p2pkv_proxy.continuation import is_sound
from p2pkv_proxy.cutting import Cut, CutError, Waits
from p2pkv_proxy.lasting import DivergedError, Lasting, SaidError
from p2pkv_proxy.passing import Passing
from p2pkv_proxy.protocols import PROTOCOLS, Answer
from p2pkv_proxy.relaying import Client, ClientFailedError
from p2pkv_proxy.reply import Reply
from p2pkv_proxy.services import Services
from p2pkv_proxy.spans import RequestSpan
from p2pkv_proxy.tracked import Tracked

_PASSING = Passing()


class Answering:
    """All attempts at one request, one after another. What ends its waits from outside goes through ``waits``."""

    def __init__(self, services: Services, scope: Scope, reply: Reply, waits: Waits) -> None:
        self._services = services
        self._scope = scope
        self._reply = reply
        self._waits = waits
        self._settings = services.settings  # a request keeps those that it has begun with
        self._began = time.monotonic()
        self.lost: list[Tracked] = []
        """Instances of the present attempt that were lost while it waited for them."""
        self.lasting: Lasting | None = None
        """What follows the answer, if another instance may go on with it."""
        self.span: RequestSpan | None = None
        self.n_resumed = 0
        self.first_byte_after: float | None = None
        """Seconds from the request's beginning until the client had a part of an answer."""
        self._decode: Tracked | None = None
        self._is_answering = False
        """The present attempt has a part of an answer."""
        self._read = 0.0
        self._own_seconds = 0.0

    def follow(self, call: Call, read: float) -> None:
        """Prepare for the answers to a call, whose body was read at ``read`` and which is ready to be sent now."""
        self._read = read
        self._own_seconds = time.monotonic() - read
        if is_sound(call, self._settings.resume):
            self.lasting = Lasting(call)

    async def attempt(self, call: Call, pair: Pair, number: int) -> None:
        """Ask a pair, and pass on its answer to the end.

        Raises :class:`InstanceError`, :class:`~p2pkv_proxy.call.AnsweredError` and :class:`CutError`.
        """
        try:
            await self._answer(call, pair, number)
        except CutError:
            if not self._reply.is_over:
                raise
            # the answer is whole: what is still waited for is the end of a prefill that nobody needs any more

    async def _answer(self, call: Call, pair: Pair, number: int) -> None:
        self.lost.clear()
        self._waits.forget_losses()
        self._decode, self._is_answering = pair.decode, False
        mode = pair.decode.instance.mode
        if self.lasting is not None and not self._reply.has_begun:
            self.lasting = Lasting(call)
            call = self.lasting.call(mode)
        with self._waits.interruptible(), self._traced(call, pair, number) as call:
            async with AsyncExitStack() as undo:
                try:
                    protocol = PROTOCOLS[mode] if call.raw is None else _PASSING
                    engines = self._services.engines
                    note_lost = partial(self._note_lost, call)
                    answer = await protocol.open(engines, call, pair, undo, note_lost)
                    if answer.pages is not None:  # not before the client has its first bytes
                        loop = asyncio.get_running_loop()
                        loop.call_soon(self._services.holdings.learn, call.prompt, answer.pages)
                    headers = self._headers(call, pair, answer, number)
                    if answer.is_stream:
                        self._reply.is_stream = answer.says_errors
                        await self._stream(answer, headers)
                    else:
                        await self._forward(answer, headers)
                finally:
                    self._reply.rest()

    def _traced(self, call: Call, pair: Pair, number: int) -> AbstractContextManager[Call]:
        return nullcontext(call) if self.span is None else self.span.attempt(call, pair, number)

    def _note_lost(self, call: Call, tracked: Tracked) -> None:
        if self._is_answering and tracked is not self._decode:
            return  # a prefill whose pages the decode has: it goes on alone
        if not self._services.router.has_others(call.prompt, call.path, tracked):
            # Busy is as silent as stopped. Its patience ends the wait, its connection, or who else comes to be ready.
            return
        self.lost.append(tracked)
        self._waits.cut(Cut.INSTANCE_LOST)

    async def _stream(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> None:
        client = Client(self._scope["p2pkv.transport"], self._settings.client_timeout)
        while events := await answer.more():
            arrived = time.monotonic()
            self._note_answering()
            if self.lasting is not None:
                events = self.lasting.take(events)
            if not events:
                self._check(answer)
                continue
            if self._reply.has_begun:
                await self._reply.write(events, more=True)
            else:
                await self._reply.begin(answer.status, headers)
                await self._reply.write(events, more=True)
                self._observe(arrived)
            self._check(answer)
            if self.lasting is None or self.lasting.needs_no_look:
                await self._pass_on(answer, client)
        await self._reply.write(b"", more=False)

    def _note_answering(self) -> None:
        """Note that the present attempt has a part of an answer."""
        if not self._is_answering and self.lasting is not None and self.lasting.n_resumed > self.n_resumed:
            self.n_resumed = self.lasting.n_resumed
            self._services.metrics.resumptions.labels("resumed").inc()
        self._is_answering = True

    def _check(self, answer: Answer) -> None:
        """Raise :class:`InstanceError` if an instance can't be followed any more."""
        try:
            if self.lasting is not None:
                self.lasting.check()
        except SaidError as error:
            raise answer.post.blame(f"said in a stream: {error}") from error
        except DivergedError as error:  # of two likeliest tokens it may take the other one
            raise InstanceError(answer.post.tracked, f"can't go on: {error}", is_fault=False) from error

    async def _pass_on(self, answer: Answer, client: Client) -> None:
        try:
            await answer.pass_on(self._services.relay, client)
        except ClientFailedError as error:
            raise CutError(Cut.CLIENT_GONE if error.is_gone else Cut.CLIENT_SLOW) from error

    async def _forward(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> None:
        body = await answer.whole()
        self._is_answering = True
        arrived = time.monotonic()
        await self._reply.whole(body, headers)
        self._observe(arrived)

    def _observe(self, arrived: float) -> None:
        now = time.monotonic()
        self.first_byte_after = now - self._began
        self._services.metrics.first_byte.observe(now - self._read)
        self._services.metrics.overhead.observe(self._own_seconds + (now - arrived))

    def _headers(self, call: Call, pair: Pair, answer: Answer, number: int) -> list[tuple[bytes, bytes]]:
        headers = [header for header in answer.headers if header[0] != b"x-request-id"]
        headers.append((b"x-request-id", call.request_id.encode("latin-1")))
        if any(name == b"x-p2pkv-explain" for name, _ in self._scope["headers"]):
            told = f"{pair.detail}; attempt {number + 1}"
            headers.append((b"x-p2pkv-route", told.encode("ascii", "replace")))
        return headers
