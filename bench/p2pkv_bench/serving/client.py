"""The clients of a serving benchmark: an open loop that sends each request when it is due, whatever the others do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from p2pkv_bench.serving.workload import Arrival


@dataclass(slots=True)
class Answer:
    """How one request was answered. Times are seconds from when it was due."""

    n_new: int
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between its tokens."""
    n_tokens: int = 0
    error: str = ""
    late: float = 0.0
    """How much later than due it was sent: the benchmark's own fault."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to measure: an endpoint, or several beside each other, among which requests are dealt out by chance."""

    name: str
    urls: tuple[str, ...]
    model: str = ""


async def drive(
    target: Target, load: Sequence[Arrival], *, timeout: float, tell: Callable[[int], None]
) -> list[Answer]:
    """Send the load and wait for every answer, at most ``timeout`` seconds each."""
    limits = aiohttp.ClientTimeout(total=timeout)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(
        timeout=limits, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        dealer = random.Random(len(load))  # noqa: S311 - no secret
        began = time.monotonic() + 0.05
        asking = []
        for number, one in enumerate(load):
            await asyncio.sleep(max(0.0, began + one.at - time.monotonic()))
            url = dealer.choice(target.urls)
            asking.append(asyncio.ensure_future(_ask(session, target.model, url, one, began + one.at)))
            if number % 20 == 0:
                tell(number)
        return list(await asyncio.gather(*asking))


async def _ask(session: aiohttp.ClientSession, model: str, url: str, one: Arrival, due: float) -> Answer:
    answer = Answer(one.n_new, late=time.monotonic() - due)
    body: dict[str, object] = {
        "prompt": one.prompt,
        "max_tokens": one.n_new,
        "stream": True,
        "ignore_eos": True,
    }
    if model:
        body["model"] = model
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:120]}"
            else:
                await _read(response, answer, due)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:160]
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer, due: float) -> None:
    before = 0.0
    tail = b""
    async for chunk in response.content.iter_any():
        now = time.monotonic() - due
        n_events = chunk.count(b'data: {"')
        if n_events and not answer.n_tokens:
            answer.first = now
        elif n_events:
            answer.gaps.append(now - before)
        answer.n_tokens += n_events
        before = now
        tail = (tail + chunk)[-400:]
    answer.last = time.monotonic() - due
    if b"[DONE]" not in tail or b'"error"' in tail:
        answer.error = "the answer broke off"
