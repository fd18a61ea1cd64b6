"""Streams whose decodes die, stop, break off or say that they have failed, at any token: another one goes on with them.

What an engine generates follows from the prompt alone, and an engine that is given tokens which nobody has generated
says so. Text lags behind tokens, events have several of them, and answers end by themselves: so one that was cut, begun
or counted in the wrong place is seen.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
from functools import partial
from typing import Any

import aiohttp

from fake_answers import ids_of, prompt_ids, stop_of, tokens_of
from fake_engines import FakeEngine
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.router import Complaints
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.app import App
from p2pkv_proxy.continuation import Resume
from p2pkv_proxy.metrics import RESUMPTIONS
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.settings import Settings
from patience import PATIENCE
from rig import Rig

_ROUNDS = 6
_AT_ONCE = 6
_MOST_TOKENS = 60
_STALLED_S = 0.05
"""For next bytes of who is stopped. Others have two minutes, more than a client here waits."""


class _Engines:
    """One good instance of each role, and decodes that fail."""

    def __init__(self, rng: random.Random, rig: Rig) -> None:
        self._rng = rng
        self._rig = rig
        self.mode = rng.choice([Mode.VLLM, Mode.VLLM, Mode.SGLANG])
        self.all: list[FakeEngine] = []
        self.bad: list[FakeEngine] = []
        self.n_frozen = 0
        self.registry: Registry

    async def start(self) -> None:
        decode = self._rng.choice([Role.BOTH, Role.DECODE])
        roles = [decode] * self._rng.randint(2, 4) + ([Role.PREFILL] if decode is Role.DECODE else [])
        for number, role in enumerate(roles):
            engine = await self._rig.engine(role, self.mode, lags=True, stops=True)
            self.all.append(engine)
            if role is decode and number:
                self.bad.append(engine)
        most = self._rng.choice([1, 1, 4])
        for engine in self.all:
            engine.burst = lambda: self._rng.randint(1, most)
        for engine in self.bad:
            share = self._rng.choice([0.02, 0.1, 0.4])
            engine.breaks = lambda engine=engine, share=share: (  # type: ignore[misc]
                self._broken(engine) if self._rng.random() < share else ""
            )

    def _broken(self, engine: FakeEngine) -> str:
        """Return how a stream breaks off. Now and then all of the engine's do: it is stopped, and its health fails."""
        if self._rng.random() > 0.1:
            return self._rng.choice(["cut", "error"])
        self.bad.remove(engine)
        engine.freeze()
        self.n_frozen += 1
        # as three of its checks, a second apart, would have found
        asyncio.get_running_loop().call_soon(
            partial(self.registry.note_probe, engine.instance.id, is_healthy=False)
        )
        return "stall"

    def disturb(self) -> None:
        """Kill one of those that fail, now and then."""
        if len(self.bad) > 1 and self._rng.random() < 0.2:
            self.bad.pop().kill()


class _Client:
    """Asks for streams, and judges them."""

    def __init__(self, rng: random.Random, tally: Tally, url: str, mode: Mode) -> None:
        self._rng = rng
        self._tally = tally
        self._url = url
        self._mode = mode
        self._n = 0

    async def ask(self, session: aiohttp.ClientSession) -> None:
        self._n += 1
        rng = self._rng
        is_chat = self._mode is Mode.VLLM and rng.random() < 0.4
        text = f"{rng.random()} prompt {self._n}"
        given: object = [rng.randrange(256) for _ in range(9)] if rng.random() < 0.2 else text
        prompt: object = [{"role": "user", "content": text}] if is_chat else given
        n = rng.randint(1, _MOST_TOKENS)
        body: dict[str, Any] = {"max_tokens": n, "stream": True, "temperature": 0}
        body["messages" if is_chat else "prompt"] = prompt
        body |= rng.choice([{}, {"stream_options": {"include_usage": True}}])
        body |= rng.choice([{}, {"return_token_ids": True}])
        is_sound = rng.random() < 0.9
        if not is_sound:
            body["temperature"] = 0.5
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        async with session.post(self._url + path, json=body) as answer:
            raw = await answer.read()
        if answer.status != 200:
            raise Broken(f"{prompt!r} was answered with status {answer.status}: {raw[:300]!r}")
        try:
            _Judged(raw, body, prompt).demand(is_whole=is_sound)
        except (Broken, ValueError, LookupError) as error:
            raise Broken(f"{error!r}: {body} was answered with {raw.decode(errors='replace')}") from error
        self._tally["sound" if is_sound else "unsound"] += 1


class _Judged:
    """One stream as its client sees it."""

    def __init__(self, raw: bytes, body: dict[str, Any], prompt: object) -> None:
        self._body = body
        self._prompt = prompt
        self._n = min(body["max_tokens"], stop_of(prompt))
        events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
        self._is_done = events[-1] == b"[DONE]"
        self._told = [json.loads(event) for event in events[: -1 if self._is_done else None]]
        self._choices = [one["choices"][0] for one in self._told if one.get("choices")]

    def demand(self, *, is_whole: bool) -> None:
        """Raise :class:`Broken` if it is not what it must be."""
        errors = [one["error"] for one in self._told if "error" in one]
        text = "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in self._choices)
        expected = "".join(tokens_of(self._prompt, self._n))
        ids = [token for choice in self._choices for token in choice.get("token_ids") or []]
        right = ids_of(self._prompt, self._n)
        if not self._is_done or errors:
            if is_whole or not errors:
                raise Broken("it broke off")
            if not expected.startswith(text) or ids != right[: len(ids)]:
                raise Broken(f"it is no beginning of {expected!r}")
            return
        if text != expected:
            raise Broken(f"its text should be {expected!r}")
        if ids != (right if self._body.get("return_token_ids") else []):
            raise Broken(f"its tokens should be {right}")
        reasons = [choice["finish_reason"] for choice in self._choices if choice.get("finish_reason")]
        if reasons != ["stop" if self._n == stop_of(self._prompt) else "length"]:
            raise Broken(f"it ended for {reasons}")
        if len({(one["id"], one["object"]) for one in self._told}) != 1:
            raise Broken("it has several ids")
        self._demand_usage()

    def _demand_usage(self) -> None:
        n_prompt = len(prompt_ids(self._prompt))
        right = {
            "prompt_tokens": n_prompt,
            "completion_tokens": self._n,
            "total_tokens": n_prompt + self._n,
        }
        found = [one["usage"] for one in self._told if one.get("usage")]
        if found != ([right] if "stream_options" in self._body else []):
            raise Broken(f"its usage is {found}, not {right}")


async def _schedule(rng: random.Random, tally: Tally, stop: Stop) -> None:
    async with Rig() as rig:
        engines = _Engines(rng, rig)
        await engines.start()
        app = App(
            Plan(
                settings=Settings(
                    attempts=len(engines.all) + 1, resume=Resume.GREEDY, stalled_after=_STALLED_S
                ),
                instances=tuple(engine.instance for engine in engines.all),
                prefill_policy="round_robin",
                decode_policy=rng.choice(["round_robin", "random", "least_loaded"]),
            )
        )
        engines.registry = app.registry
        listening = await rig.router(app)
        while not all(tracked.state.value == "ready" for tracked in app.registry):
            await asyncio.sleep(0.005)
        timeout = aiohttp.ClientTimeout(60 * PATIENCE)
        session = await rig.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        client = _Client(rng, tally, listening.url, engines.mode)
        for _ in range(_ROUNDS):
            engines.disturb()
            await asyncio.gather(*(client.ask(session) for _ in range(_AT_ONCE)))
            if stop():
                break
        for engine in engines.all:
            if engine.crashed:
                raise Broken(f"an engine was given {engine.crashed}")
        tally["stopped"] += engines.n_frozen
        for outcome in RESUMPTIONS:
            found = app.metrics.resumptions.labels(outcome)._value.get()
            tally[outcome] += int(found)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule on a loop of its own."""
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        asyncio.run(_schedule(random.Random(seed), tally, stop))
    finally:
        logging.getLogger().removeHandler(complaints)
        gc.collect()  # tasks and their connections are in cycles
    if complaints.found:
        raise Broken("the router complained:\n" + "\n".join(complaints.found)[:3000])


HUNT = Hunt(
    "resume",
    "a stream whose decode fails goes on elsewhere, and no token in it is wrong, doubled or lost",
    run,
    effects=("sound", "unsound", "resumed", "completed", "unsuited", "stopped"),
    enough=20,
)
