"""Seeing a request through: deadlines, a client that leaves, and another pair where one fails in time.

A request has one task. What must end its wait from outside (its deadline, its client leaving, the loss of an
instance it waits for) goes through :meth:`Exchange.cut`, which cancels what the task waits for and says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext

from p2pkv_proxy.bodies import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    TooLargeError,
    error_body,
    read_body,
    respond,
)
from p2pkv_proxy.call import AnsweredError, Call, InstanceError, Pair
from p2pkv_proxy.continuation import is_sound
from p2pkv_proxy.cutting import Cut, CutError, Waits
from p2pkv_proxy.lasting import DivergedError, Lasting, SaidError
from p2pkv_proxy.passing import PASSED, Passing, read_passed
from p2pkv_proxy.prompts import MalformedError
from p2pkv_proxy.protocols import PROTOCOLS, Answer
from p2pkv_proxy.reading import READERS, line_of, priority_of, read_call
from p2pkv_proxy.relaying import Client, ClientFailedError
from p2pkv_proxy.reply import Reply
from p2pkv_proxy.retry_budget import pause
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.services import Services
from p2pkv_proxy.tracked import Tracked
from p2pkv_proxy.waiting_room import Ticket

_log = logging.getLogger(__name__)

_DOUBTFUL = frozenset({401, 403, 404})
"""An engine that says so may lack a model or a key that others have: another one is asked."""
_PASSING = Passing()


class Exchange:
    """One request and its answer."""

    def __init__(self, services: Services, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._settings = services.settings
        self._receive = receive
        self._reply = Reply(scope, send)
        self._waits = Waits()
        self.began = time.monotonic()
        self._deadline = self.began + min(self._settings.body_timeout, self._settings.request_timeout)
        self._lost: list[Tracked] = []
        self._decode: Tracked | None = None
        self._is_answering = False
        """The present attempt has a part of an answer."""
        self._lasting: Lasting | None = None
        """What follows the answer, if another instance may go on with it."""
        self._failed: set[str] = set()
        self._own_seconds = 0.0
        self._nbytes = 0
        self._hold = services.large_bodies.hold()
        # for whoever tells of it when it has ended
        self.scope = scope
        self.span = services.spans.begin(scope) if services.spans is not None else None
        self.call: Call | None = None
        """The request, once it is understood."""
        self.pair: Pair | None = None
        """The last one that it was sent to."""
        self.n_attempts = 0
        self.n_resumed = 0
        self.first_byte_after: float | None = None
        """Seconds from its beginning until the client had a part of an answer."""

    def check(self, now: float) -> None:
        """End the wait if it is over."""
        if now >= self._deadline:
            self.cut(Cut.DEADLINE)
        elif self._reply.is_slow(now, self._settings.client_timeout):
            self.cut(Cut.CLIENT_SLOW)

    def cut(self, why: Cut) -> None:
        """End what the request waits for, once."""
        self._waits.cut(why)

    def _note_lost(self, tracked: Tracked) -> None:
        if self._is_answering and tracked is not self._decode:
            return  # a prefill whose pages the decode has: it goes on alone
        self._lost.append(tracked)
        self.cut(Cut.INSTANCE_LOST)

    async def run(self) -> str:
        """Serve the request; return its outcome for the metrics."""
        try:
            return await self._serve()
        except CutError as error:
            return await self._cut_off(error.why)
        except ClientGoneError:
            return "client_gone"
        except TooLargeError:
            await self._fail(413, f"the body has more than {self._settings.max_body} bytes", close=True)
        except MalformedError as error:
            await self._fail(400, str(error))
        except RefusedError as error:
            await self.refuse(error)
            return "client_error" if error.status in (400, 404) else "refused"
        except AnsweredError as error:
            await self._respond(error.status, error.body, content_type=error.content_type.encode())
        finally:
            self._hold.release()
        return "client_error"

    async def _serve(self) -> str:
        with self._waits.interruptible():
            headers, most = self.scope["headers"], self._settings.max_body
            raw = await read_body(headers, self._receive, most, self._hold)
        self._deadline = self.began + self._settings.request_timeout
        read = time.monotonic()
        self._nbytes = len(raw)
        with self._waits.interruptible():
            call = await self._services.large_bodies.in_turn(len(raw), lambda: self._read(raw))
        self.call = call
        on_gone = self.scope["p2pkv.on_gone"]
        on_gone.add(self._note_gone)
        try:
            if self._services.router.wants_holdings and call.raw is None:
                with self._waits.interruptible():
                    await self._services.holdings.look_up(call.prompt)
            self._own_seconds = time.monotonic() - read
            if is_sound(call, self._settings.resume):
                self._lasting = Lasting(call)
            self._services.retry_budget.note_request()
            return await self._attempts(call, read)
        finally:
            on_gone.discard(self._note_gone)

    def _read(self, raw: bytes) -> Call:
        scope, authorization = self.scope, self._services.authorization
        if scope["path"] in READERS and scope["method"] == "POST":
            call = read_call(scope, raw, authorization)
            if len(raw) > self._services.large_bodies.large:
                call.prompt.blocks()  # here, where it holds up nobody; most policies want them
            return call
        return read_passed(scope, raw, authorization)

    def _note_gone(self) -> None:
        self.cut(Cut.CLIENT_GONE)

    async def _attempts(self, call: Call, read: float) -> str:
        """Try pair after pair until one has answered, or what the client has can't be continued."""
        error: InstanceError | None = None
        doubtful: list[AnsweredError] = []
        # what is not known to change nothing is asked for once
        is_repeatable = call.raw is None or self.scope["path"] in PASSED
        for number in range(self._settings.attempts if is_repeatable else 1):
            if number and not await self._may_retry(number):
                break
            try:
                pair = await self._choose(call, number)
            except RefusedError:
                if error is None and not doubtful:
                    raise
                break
            try:
                await self._attempt(call, pair, number, read)
                for refusal in doubtful:  # it was not the request's fault
                    refusal.tracked.blamed(time.monotonic())  # type: ignore[union-attr]
                return "ok"
            except AnsweredError as refusal:
                if refusal.tracked is None or not (self._reply.has_begun or refusal.status in _DOUBTFUL):
                    raise
                doubtful.append(refusal)
                self._waits.forget_losses()
                self._failed.add(refusal.tracked.id)
                continue
            except InstanceError as failure:
                error = failure
            except CutError as cut:
                if cut.why is not Cut.INSTANCE_LOST:
                    raise
                error = InstanceError(self._lost[-1], "was lost")
            self._failed.add(error.tracked.id)
            self._waits.forget_losses()  # what is waited for from here on is another instance's
            _log.warning("request %s, attempt %d: %s", call.request_id, number + 1, error)
            if self._reply.has_begun:
                resumed = await self._go_on(error, pair)
                if isinstance(resumed, str):
                    return resumed
                call = resumed
        if self._reply.has_begun:
            assert error is not None
            return await self._break_off(error, "failed")
        if doubtful:
            raise doubtful[0]
        assert error is not None
        await self._give_up(error)
        return "engine_error"

    async def _may_retry(self, number: int) -> bool:
        """Wait until another attempt is due; say whether there may be one."""
        if not self._services.retry_budget.take():
            self._services.metrics.refused_retries.inc()
            return False
        self._services.metrics.retries.inc()
        if (seconds := pause(number)) > 0:
            with self._waits.interruptible():
                await asyncio.sleep(seconds)
        return True

    async def _choose(self, call: Call, number: int) -> Pair:
        """Choose a pair for the next attempt, or wait until one has room. Raises :class:`RefusedError`."""
        services = self._services
        ticket = Ticket(
            priority_of(self.scope), tenant=self.scope.get("p2pkv.key") or "", nbytes=self._nbytes
        )
        with self._waits.interruptible():
            pair = await services.waiting_room.choose(
                lambda: services.router.choose(call.prompt, call.path, self._failed),
                line_of(call),
                ticket,
            )
        self.pair, self.n_attempts = pair, number + 1
        self._services.metrics.choices.labels(pair.reason).inc()
        self._services.metrics.chose(pair.prefill.id if pair.prefill else "", pair.decode.id)
        return pair

    async def _go_on(self, error: InstanceError, pair: Pair) -> Call | str:
        """Return what another instance is asked behind the client's part of the answer, or how it has ended."""
        lasting = self._lasting
        if lasting is None or not lasting.can_resume:
            return await self._break_off(error, "unsuited")
        if (rest := lasting.ending()) is not None:
            self._services.metrics.resumptions.labels("completed").inc()
            with self._waits.interruptible():
                await self._reply.write(rest, more=False)
            return "ok"
        call = lasting.resume(pair.decode.instance.model)
        if self._services.router.wants_holdings:
            with self._waits.interruptible():
                await self._services.holdings.look_up(call.prompt)
        return call

    async def _attempt(self, call: Call, pair: Pair, number: int, read: float) -> None:
        try:
            await self._answer(call, pair, number, read)
        except CutError:
            if not self._reply.is_over:
                raise
            # the answer is whole: what is still waited for is the end of a prefill that nobody needs any more

    async def _answer(self, call: Call, pair: Pair, number: int, read: float) -> None:
        self._lost.clear()
        self._waits.forget_losses()
        self._decode, self._is_answering = pair.decode, False
        mode = pair.decode.instance.mode
        if self._lasting is not None and not self._reply.has_begun:
            self._lasting = Lasting(call)
            call = self._lasting.call(mode)
        with self._waits.interruptible(), self._traced(call, pair, number) as call:
            async with AsyncExitStack() as undo:
                try:
                    protocol = PROTOCOLS[mode] if call.raw is None else _PASSING
                    engines = self._services.engines
                    answer = await protocol.open(engines, call, pair, undo, self._note_lost)
                    if answer.pages is not None:  # not before the client has its first bytes
                        loop = asyncio.get_running_loop()
                        loop.call_soon(self._services.holdings.learn, call.prompt, answer.pages)
                    headers = self._answer_headers(call, pair, answer, number)
                    if answer.is_stream:
                        self._reply.is_stream = answer.says_errors
                        await self._stream(answer, headers, read)
                    else:
                        await self._forward(answer, headers, read)
                finally:
                    self._reply.rest()

    def _traced(self, call: Call, pair: Pair, number: int) -> AbstractContextManager[Call]:
        return nullcontext(call) if self.span is None else self.span.attempt(call, pair, number)

    async def _stream(self, answer: Answer, headers: list[tuple[bytes, bytes]], read: float) -> None:
        client = Client(self.scope["p2pkv.transport"], self._settings.client_timeout)
        while events := await answer.more():
            arrived = time.monotonic()
            self._note_answering()
            if self._lasting is not None:
                events = self._lasting.take(events)
            if not events:
                self._check(answer)
                continue
            if self._reply.has_begun:
                await self._reply.write(events, more=True)
            else:
                await self._reply.begin(answer.status, headers)
                await self._reply.write(events, more=True)
                self._observe(read, arrived)
            self._check(answer)
            if self._lasting is None or self._lasting.needs_no_look:
                await self._pass_on(answer, client)
        await self._reply.write(b"", more=False)

    def _note_answering(self) -> None:
        """Note that the present attempt has a part of an answer."""
        if not self._is_answering and self._lasting is not None and self._lasting.n_resumed > self.n_resumed:
            self.n_resumed = self._lasting.n_resumed
            self._services.metrics.resumptions.labels("resumed").inc()
        self._is_answering = True

    def _check(self, answer: Answer) -> None:
        """Raise :class:`InstanceError` if an instance can't be followed any more."""
        try:
            if self._lasting is not None:
                self._lasting.check()
        except SaidError as error:
            raise answer.post.blame(f"said in a stream: {error}") from error
        except DivergedError as error:  # of two likeliest tokens it may take the other one
            raise InstanceError(answer.post.tracked, f"can't go on: {error}", is_fault=False) from error

    async def _pass_on(self, answer: Answer, client: Client) -> None:
        try:
            await answer.pass_on(self._services.relay, client)
        except ClientFailedError as error:
            raise CutError(Cut.CLIENT_GONE if error.is_gone else Cut.CLIENT_SLOW) from error

    async def _forward(self, answer: Answer, headers: list[tuple[bytes, bytes]], read: float) -> None:
        body = await answer.whole()
        self._is_answering = True
        arrived = time.monotonic()
        await self._reply.whole(body, headers)
        self._observe(read, arrived)

    def _observe(self, read: float, arrived: float) -> None:
        now = time.monotonic()
        self.first_byte_after = now - self.began
        self._services.metrics.first_byte.observe(now - read)
        self._services.metrics.overhead.observe(self._own_seconds + (now - arrived))

    def _answer_headers(
        self, call: Call, pair: Pair, answer: Answer, number: int
    ) -> list[tuple[bytes, bytes]]:
        headers = [header for header in answer.headers if header[0] != b"x-request-id"]
        headers.append((b"x-request-id", call.request_id.encode("latin-1")))
        if any(name == b"x-p2pkv-explain" for name, _ in self.scope["headers"]):
            told = f"{pair.detail}; attempt {number + 1}"
            headers.append((b"x-p2pkv-route", told.encode("ascii", "replace")))
        return headers

    async def refuse(self, error: RefusedError) -> None:
        """Say that nobody takes the request now."""
        headers = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        if error.status == 401:
            headers = [(b"www-authenticate", b"Bearer"), (b"connection", b"close")]
        await self._respond(error.status, error_body(error.status, str(error)), headers)

    async def _fail(self, status: int, message: str, *, close: bool = False) -> None:
        headers = [(b"connection", b"close")] if close else []
        await self._respond(status, error_body(status, message), headers)

    async def _respond(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        content_type: bytes = b"application/json",
    ) -> None:
        """Answer without an engine's stream; hang up on a client that does not take it in time."""
        self._deadline = time.monotonic() + self._settings.client_timeout
        try:
            with self._waits.interruptible():
                self._reply.check_client()
                await respond(self._reply.send, status, body, headers, content_type)
        except CutError:
            self._reply.hang_up()

    async def _give_up(self, error: InstanceError) -> None:
        """Every attempt failed, and nothing has been sent: the last engine's own words, if it had any."""
        body = error.body or error_body(error.status, f"{error}, and no other instance did it")
        headers = [(b"retry-after", b"1")] if error.status in (429, 503) else []
        await self._respond(error.status, body, headers)

    async def _break_off(self, error: InstanceError, why: str) -> str:
        """End an answer that can't go on so that nobody takes it for whole; return how it has ended."""
        if self._reply.is_stream:
            self._services.metrics.resumptions.labels(why).inc()
        told = error_body(502, f"the answer broke off: {error}")
        await self._end_stream(b"data: " + told + b"\n\n")
        return "broken_off"

    async def _end_stream(self, event: bytes) -> None:
        """Send a last event, unless the client doesn't take it. What is no stream has no place for one."""
        if not self._reply.is_stream:
            self._reply.hang_up()
            return
        self._deadline = min(self._deadline, time.monotonic() + self._settings.client_timeout)
        try:
            with self._waits.interruptible():
                await self._reply.write(event, more=False)
        except CutError:
            _log.info("a client did not take the end of its answer")
            self._reply.hang_up()

    async def _cut_off(self, why: Cut) -> str:
        if why in (Cut.CLIENT_GONE, Cut.CLIENT_SLOW):
            self._reply.hang_up()
            return "client_gone"
        if why is Cut.ROUTER_ENDS and self._reply.has_begun:
            await self._end_stream(
                b"data: " + error_body(503, "the answer broke off: the router ends") + b"\n\n"
            )
            return "broken_off"
        if why is Cut.ROUTER_ENDS:
            await self._fail(503, "the router ends", close=True)
            return "refused"
        is_reading = self._deadline < self.began + self._settings.request_timeout
        if self._reply.has_begun:
            self._deadline = float("inf")
            await self._end_stream(b"data: " + error_body(504, "the request's time is over") + b"\n\n")
        elif self._hold.is_waiting:
            await self._fail(429, "the router has as many large bodies as it may", close=True)
        elif is_reading:
            await self._fail(408, "the request did not arrive in time", close=True)
        else:
            await self._fail(504, "no instance answered in time")
        return "timed_out"
