"""A router whose files are written, half written, broken and removed while requests come and streams run.

What holds at each moment is known: the last content of each file that could be used and was the same at two looks. A
request may meet any of what held between its beginning and its answer's, and nothing else; once begun it ends whole.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from fake_answers import tokens_of
from fake_engines import FakeEngine
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.router_operator import FEW, KEYS, LONG_S, SHORT_S, Asked, Operator
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.app import App
from p2pkv_proxy.metrics import RESUMPTIONS
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.reloading import loaded
from p2pkv_proxy.settings import Settings
from patience import PATIENCE
from rig import Rig

_ROUNDS = 25
_AT_ONCE = 6
_SLOW_TOKENS = 100
"""Of a stream that stands still for a while behind its first ones."""
_PATH = "/v1/completions"


class Clients:
    """Requests, each judged by what held while it was let in."""

    def __init__(
        self, rng: random.Random, tally: Tally, operator: Operator, engines: Sequence[FakeEngine], url: str
    ) -> None:
        self._rng = rng
        self._tally = tally
        self._operator = operator
        self._engines = engines
        self._url = url
        self._n = 0

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """Ask for an answer, and judge it."""
        self._n += 1
        rng, prompt = self._rng, f"prompt {self._n}"
        n, is_stream, key = (
            rng.randint(1, 30),
            rng.random() < 0.8,
            rng.choice([*KEYS, "sk-nobodys-0123456789"]),
        )
        # those that are greedy go through Python, the others natively
        body = {"prompt": prompt, "max_tokens": n, "stream": is_stream, "temperature": rng.choice([0, 1])}
        asked = Asked([self._operator.state], prompt=prompt)
        self._operator.under_way.append(asked)
        try:
            headers = {"authorization": f"Bearer {key}"}
            async with session.post(self._url + _PATH, json=body, headers=headers) as answer:
                asked.is_begun = True
                status, raw = answer.status, await answer.read()
        finally:
            self._operator.under_way.remove(asked)
        self._judge(asked, key, status, raw, "".join(tokens_of(prompt, n)), is_stream=is_stream)

    def _judge(
        self, asked: Asked, key: str, status: int, raw: bytes, expected: str, *, is_stream: bool
    ) -> None:
        states = asked.states
        what = f"{asked.prompt!r} ({status}: {raw[:200]!r})"
        if status == 401:
            if all(key in state.keys for state in states):
                raise Broken(f"{what} has a key that was known all the time")
            self._tally["without a key"] += 1
            return
        if all(key not in state.keys for state in states):
            raise Broken(f"{what} has a key that nobody has given")
        if status == 429:
            if all(state.told.get("max_in_flight") != FEW for state in states):
                raise Broken(f"{what} was refused, and there was room all the time")
            self._tally["refused"] += 1
            return
        if status != 200:
            raise Broken(f"{what}, though all engines are well")
        self._judge_place(asked)
        if (_joined(raw) if is_stream else json.loads(raw)["choices"][0]["text"]) != expected:
            raise Broken(f"{what} is not {expected!r}")
        self._tally["whole"] += 1
        self._tally["whole, with something changed meanwhile"] += asked.reloads > 0

    def _judge_place(self, asked: Asked) -> None:
        for number, engine in enumerate(self._engines):
            for body, headers in zip(engine.requests, engine.headers, strict=True):
                if body["prompt"] != asked.prompt:
                    continue
                if all(number not in state.instances for state in asked.states):
                    raise Broken(f"{asked.prompt!r} went to instance {number}, which is not listed")
                told = headers.get("authorization", "").removeprefix("Bearer ")
                if told not in {state.engines_key for state in asked.states}:
                    raise Broken(
                        f"{asked.prompt!r} came with the engines' key {told!r}, which is another one"
                    )


def _joined(raw: bytes) -> str:
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    if events[-1] != b"[DONE]" or any(b'"error"' in event for event in events):
        raise Broken(f"a stream has broken off, though its engine is well: {raw[-300:]!r}")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def _slow_ones(
    session: aiohttp.ClientSession, operator: Operator, engines: Sequence[FakeEngine], url: str
) -> None:
    """Streams that stand still for longer than others may, which began while they were allowed to."""
    gate = asyncio.Semaphore(0)
    for engine in engines:
        engine.token_gate = gate

    begun: set[int] = set()

    async def slow(prompt: str, temperature: int) -> bytes:
        body = {"prompt": prompt, "max_tokens": _SLOW_TOKENS, "stream": True, "temperature": temperature}
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        async with session.post(url + _PATH, json=body, headers=headers) as answer:
            await answer.content.readuntil(b"\n\n")
            begun.add(temperature)
            return await answer.read()

    # one goes through Python, and the other one is passed on natively
    streams = [asyncio.ensure_future(slow(f"slow {number}", number)) for number in range(2)]
    while len(begun) < len(streams):
        gate.release()  # whoever is next gets it, so it takes more than one for each
        await asyncio.sleep(0.005)
    await operator.work(10)
    operator.shorten()
    await asyncio.sleep(3 * SHORT_S)  # what is asked is whether they may stand still so long
    for _ in range(len(streams) * _SLOW_TOKENS):
        gate.release()
    for number, raw in enumerate(await asyncio.gather(*streams)):
        whole = "".join(tokens_of(f"slow {number}", _SLOW_TOKENS))
        if _joined(raw) != whole[len(whole) - len(_joined(raw)) :]:
            raise Broken(f"slow stream {number} was {raw!r}")
    counts = {how: operator.app.metrics.resumptions.labels(how)._value.get() for how in RESUMPTIONS}
    if any(counts.values()):
        raise Broken(f"streams were cut, and went on elsewhere: {counts}")


async def _schedule(rng: random.Random, tally: Tally, stop: Stop, folder: Path) -> None:
    async with Rig() as rig:

        def cut(event: bytes) -> list[bytes]:
            at = rng.randint(1, len(event) - 1)
            return [event[:at], event[at:]]

        engines = [await rig.engine(Role.BOTH, pieces=cut) for _ in range(4)]
        operator = Operator(rng, tally, folder, engines)
        operator.app = app = App(loaded(Plan(settings=Settings(answer_timeout=LONG_S), files=operator.files)))
        app.reloading.follow = _never  # type: ignore[method-assign]
        listening = await rig.router(app)
        while not all(tracked.state.value == "ready" for tracked in app.registry):
            await asyncio.sleep(0.005)
        session = await rig.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60 * PATIENCE))
        )
        clients = Clients(rng, tally, operator, engines, listening.url)
        for _ in range(_ROUNDS):
            await asyncio.gather(
                operator.work(rng.randint(1, 12)), *(clients.ask(session) for _ in range(_AT_ONCE))
            )
            if stop():
                break
        operator.end()
        await _slow_ones(session, operator, engines, listening.url)


async def _never() -> None:
    """Files are looked at when the schedule says so."""
    await asyncio.Event().wait()


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Run one schedule."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_schedule(random.Random(seed), tally, stop, Path(folder)))
    gc.collect()  # tasks and their connections are in cycles


HUNT = Hunt(
    "router_reload",
    "a file that can't be used changes nothing; what has begun ends whole, whatever changes",
    run,
    effects=(
        "files taken",
        "files refused",
        "whole, with something changed meanwhile",
        "refused",
        "without a key",
    ),
    enough=8,
)
