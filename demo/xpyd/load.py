"""The xPyD demo's clients: many requests at once, each checked against what one process alone generates."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

from demo.model import PAGE, Floats, Model, Tokens, decode, encode
from demo.paged_kv import PagedKV
from demo.xpyd.server import SHAPE

_SUBJECTS = ("the cache", "a page", "the directory", "a reader", "the pool", "a shard", "the owner", "a span")
_VERBS = ("moves", "keeps", "loses", "finds", "reads", "names", "checks", "evicts", "remembers", "forgets")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load."""

    prompt: str
    n_new: int
    is_stream: bool
    is_chat: bool

    @property
    def tokens(self) -> Tokens:
        """The prompt as the engine sees it."""
        return encode((f"user: {self.prompt}\nassistant:" if self.is_chat else self.prompt).encode())

    @property
    def path(self) -> str:
        """Where it goes."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        """What is sent."""
        prompt: dict[str, object] = (
            {"messages": [{"role": "user", "content": self.prompt}]}
            if self.is_chat
            else {"prompt": self.prompt}
        )
        return {"model": "demo", "max_tokens": self.n_new, "stream": self.is_stream, **prompt}


@dataclass(slots=True)
class Answered:
    """What became of it."""

    asked: Asked
    text: str = ""
    error: str = ""
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def has_tokens(self) -> bool:
        """Whether some reached the client."""
        return bool(self.text)


@dataclass(slots=True)
class Tally:
    """The load so far."""

    n_sent: int = 0
    answered: list[Answered] = field(default_factory=list)


def mixed(n: int, seed: int) -> list[Asked]:
    """Make requests of all kinds, many of which begin alike."""
    chooser = random.Random(seed)  # noqa: S311 - no secret
    beginnings = [_text(chooser, chooser.randrange(60, 300)) for _ in range(max(2, n // 10))]
    return [
        Asked(
            prompt=chooser.choice(beginnings) + _text(chooser, chooser.randrange(5, 80)),
            n_new=chooser.randrange(4, 33),
            is_stream=chooser.random() < 0.7,
            is_chat=chooser.random() < 0.3,
        )
        for _ in range(n)
    ]


def _text(chooser: random.Random, n_bytes: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) < n_bytes:
        words += [chooser.choice(_SUBJECTS), chooser.choice(_VERBS), f"{chooser.choice(_SUBJECTS)}."]
    return " ".join(words) + " "


class Reference:
    """What one process alone generates, computed once a prompt."""

    def __init__(self) -> None:
        self._model = Model(SHAPE)
        self._kv = PagedKV(SHAPE.max_tokens // PAGE, SHAPE.page)
        self._known: dict[tuple[str, bool, int], str] = {}

    def text(self, asked: Asked) -> str:
        """Return the right answer."""
        key = asked.prompt, asked.is_chat, asked.n_new
        if key not in self._known:
            self._known[key] = self._generate(asked)
        return self._known[key]

    def _generate(self, asked: Asked) -> str:
        tokens = list(asked.tokens)
        pages = self._kv.take(-(-(len(tokens) + asked.n_new) // PAGE))
        for page in range(-(-len(tokens) // PAGE)):
            hidden = self._compute(tokens, pages, page)
        for _ in range(asked.n_new):
            tokens.append(self._model.next_token(hidden[(len(tokens) - 1) % PAGE]))
            hidden = self._compute(tokens, pages, (len(tokens) - 1) // PAGE)
        self._kv.give_back(pages)
        return decode(tokens[-asked.n_new :]).decode(errors="replace")

    def _compute(self, tokens: Tokens, pages: list[int], page: int) -> Floats:
        return self._model.run_page(tokens[page * PAGE : (page + 1) * PAGE], pages[: page + 1], self._kv)


async def drive(url: str, load: list[Asked], tally: Tally, per_second: float) -> None:
    """Send the load at a steady rate; every request ends in ``tally``."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.monotonic()
        asking = []
        for number, asked in enumerate(load):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            tally.n_sent += 1
            asking.append(asyncio.ensure_future(_ask(session, url, asked, tally)))
        await asyncio.gather(*asking)


async def _ask(session: aiohttp.ClientSession, url: str, asked: Asked, tally: Tally) -> None:
    answered = Answered(asked)
    began = time.monotonic()
    try:
        async with session.post(url + asked.path, json=asked.body) as response:
            if response.status != 200:
                answered.error = f"status {response.status}: {(await response.text())[:200]}"
            elif asked.is_stream:
                await _read_stream(response, answered, began)
            else:
                choice = (await response.json())["choices"][0]
                answered.text = choice["text"] if "text" in choice else choice["message"]["content"]
                answered.first_token_seconds = time.monotonic() - began
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        answered.error = f"{type(error).__name__}: {error}"
    answered.seconds = time.monotonic() - began
    tally.answered.append(answered)


async def _read_stream(response: aiohttp.ClientResponse, answered: Answered, began: float) -> None:
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            answered.error = event["error"]["message"]
            return
        if not answered.text:
            answered.first_token_seconds = time.monotonic() - began
        choice = event["choices"][0]
        answered.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    answered.error = answered.error or "the stream ended without [DONE]"
