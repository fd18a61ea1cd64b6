"""Seeing a request through: deadlines, a client that leaves, and another pair where one fails in time.

A request has one task. What must end its wait from outside (its deadline, its client leaving, the loss of an
instance it waits for) goes through :meth:`Exchange.cut`, which cancels what the task waits for and says why.
"""

from __future__ import annotations

import asyncio
import logging
import time

from p2pkv_proxy.answering import Answering
from p2pkv_proxy.bodies import (
    ClientGoneError,
    CrumbledError,
    Receive,
    Scope,
    Send,
    TooLargeError,
    read_body,
)
from p2pkv_proxy.call import AnsweredError, Call, InstanceError, Pair
from p2pkv_proxy.cutting import Cut, CutError, Waits
from p2pkv_proxy.last_words import LastWords
from p2pkv_proxy.passing import PASSED, read_passed
from p2pkv_proxy.prompts import MalformedError
from p2pkv_proxy.reading import READERS, line_of, priority_of, read_call
from p2pkv_proxy.reply import Reply
from p2pkv_proxy.retry_budget import pause
from p2pkv_proxy.routing import RefusedError
from p2pkv_proxy.services import Services
from p2pkv_proxy.waiting_room import Ticket

_log = logging.getLogger(__name__)

_DOUBTFUL = frozenset({401, 403, 404})
"""An engine that says so may lack a model or a key that others have: another one is asked."""


class Exchange:
    """One request and its answer."""

    def __init__(self, services: Services, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._settings = services.settings
        self._receive = receive
        self._reply = Reply(scope, send)
        self._waits = Waits()
        self.began = time.monotonic()
        self._waits.deadline = self.began + min(self._settings.body_timeout, self._settings.request_timeout)
        self._failed: set[str] = set()
        self._nbytes = 0
        self._hold = services.large_bodies.hold()
        self.answering = Answering(services, scope, self._reply, self._waits)
        self.words = LastWords(self._reply, self._waits, self._settings.client_timeout)
        # for whoever tells of it when it has ended
        self.scope = scope
        self.span = services.spans.begin(scope) if services.spans is not None else None
        self.answering.span = self.span
        self.call: Call | None = None
        """The request, once it is understood."""
        self.pair: Pair | None = None
        """The last one that it was sent to."""
        self.n_attempts = 0

    def check(self, now: float) -> None:
        """End the wait if it is over."""
        if now >= self._waits.deadline:
            self.cut(Cut.DEADLINE)
        elif self._reply.is_slow(now, self._settings.client_timeout):
            self.cut(Cut.CLIENT_SLOW)

    def cut(self, why: Cut) -> None:
        """End what the request waits for, once."""
        self._waits.cut(why)

    async def run(self) -> str:
        """Serve the request; return its outcome for the metrics."""
        try:
            return await self._serve()
        except CutError as error:
            return await self._cut_off(error.why)
        except ClientGoneError:
            return "client_gone"
        except TooLargeError:
            await self.words.fail(413, f"the body has more than {self._settings.max_body} bytes", close=True)
        except CrumbledError:
            await self.words.fail(
                400, "the body comes in too many pieces; send it in larger chunks", close=True
            )
        except MalformedError as error:
            await self.words.fail(400, str(error))
        except RefusedError as error:
            await self.words.refuse(error)
            return "client_error" if error.status in (400, 404) else "refused"
        except AnsweredError as error:
            await self.words.repeat(error)
        finally:
            self._hold.release()
        return "client_error"

    async def _serve(self) -> str:
        with self._waits.interruptible():
            raw = await read_body(self.scope, self._receive, self._settings.max_body, self._hold)
        self._waits.deadline = self.began + self._settings.request_timeout
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
            self.answering.follow(call, read)
            self._services.retry_budget.note_request()
            return await self._attempts(call)
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

    async def _attempts(self, call: Call) -> str:
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
            failed = await self._attempt(call, pair, number)
            if failed is None:
                for refusal in doubtful:  # it was not the request's fault
                    refusal.tracked.blamed(time.monotonic())  # type: ignore[union-attr]
                return "ok"
            if isinstance(failed, AnsweredError):
                doubtful.append(failed)
                continue
            error = failed
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
        await self.words.give_up(error)
        return "engine_error"

    async def _attempt(self, call: Call, pair: Pair, number: int) -> InstanceError | AnsweredError | None:
        """Ask a pair; return why another one is to be asked, or None where the client has its answer."""
        failed: InstanceError | AnsweredError
        try:
            await self.answering.attempt(call, pair, number)
        except AnsweredError as refusal:
            if refusal.tracked is None or not (self._reply.has_begun or refusal.status in _DOUBTFUL):
                raise
            failed = refusal
            self._failed.add(refusal.tracked.id)
        except InstanceError as failure:
            failed = failure
            self._failed.add(failure.tracked.id)
        except CutError as cut:
            if cut.why is not Cut.INSTANCE_LOST:
                raise
            failed = InstanceError(self.answering.lost[-1], "was lost")
            self._failed.add(failed.tracked.id)
        else:
            return None
        self._waits.forget_losses()  # what is waited for from here on is another instance's
        return failed

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
        lasting = self.answering.lasting
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

    async def _break_off(self, error: InstanceError, why: str) -> str:
        """End an answer that can't go on so that nobody takes it for whole; return how it has ended."""
        if self._reply.is_stream:
            self._services.metrics.resumptions.labels(why).inc()
        await self.words.break_off(502, f"the answer broke off: {error}")
        return "broken_off"

    async def _cut_off(self, why: Cut) -> str:
        if why in (Cut.CLIENT_GONE, Cut.CLIENT_SLOW):
            self._reply.hang_up()
            return "client_gone"
        if why is Cut.ROUTER_ENDS and self._reply.has_begun:
            await self.words.break_off(503, "the answer broke off: the router ends")
            return "broken_off"
        if why is Cut.ROUTER_ENDS:
            await self.words.fail(503, "the router ends", close=True)
            return "refused"
        is_reading = self._waits.deadline < self.began + self._settings.request_timeout
        if self._reply.has_begun:
            self._waits.deadline = float("inf")
            await self.words.break_off(504, "the request's time is over")
        elif self._hold.is_waiting:
            await self.words.fail(429, "the router has as many large bodies as it may", close=True)
        elif is_reading:
            await self.words.fail(408, "the request did not arrive in time", close=True)
        else:
            await self.words.fail(504, "no instance answered in time")
        return "timed_out"
