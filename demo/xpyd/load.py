"""The xPyD demo's clients: many requests at once, each checked against what one process alone generates."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from demo.model import PAGE, Floats, Model, Tokens, decode, encode
from demo.paged_kv import PagedKV
from demo.xpyd.server import SHAPE

_SUBJECTS = ("the cache", "a page", "the directory", "a reader", "the pool", "a shard", "the owner", "a span")
_VERBS = ("moves", "keeps", "loses", "finds", "reads", "names", "checks", "evicts", "remembers", "forgets")
_ASK_AGAIN_S = 1.0
"""What the router's ``Retry-After`` says for one that is busy."""


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
    ids: list[int] = field(default_factory=list)
    """The tokens, where the engine tells them."""
    error: str = ""
    n_asked: int = 0
    """Times until it was answered."""
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def has_tokens(self) -> bool:
        """Whether some reached the client."""
        return bool(self.text or self.ids)


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


async def drive(
    url: str,
    load: Sequence[Asked],
    tally: Tally,
    per_second: float,
    *,
    fields: Callable[[Asked], Mapping[str, object]] = lambda asked: {},
    patience: float = 0.0,
) -> None:
    """Send the load at a steady rate; every request ends in ``tally``.

    ``fields`` gives what goes into a request's body besides. A request that failed before its first token is sent
    again for ``patience`` seconds.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        client = _Client(session, url, fields, patience)
        began = time.monotonic()
        asking = []
        for number, asked in enumerate(load):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            tally.n_sent += 1
            asking.append(asyncio.ensure_future(client.ask(asked, tally)))
        await asyncio.gather(*asking)


class _Client:
    """What all requests of a load have in common."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        fields: Callable[[Asked], Mapping[str, object]],
        patience: float,
    ) -> None:
        self._session = session
        self._url = url
        self._fields = fields
        self._patience = patience

    async def ask(self, asked: Asked, tally: Tally) -> None:
        """Send a request, again if need be, and put what became of it into ``tally``."""
        answered = Answered(asked)
        began = time.monotonic()
        while True:
            answered.n_asked += 1
            answered.error = ""
            try:
                await self._ask_once(answered)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                answered.error = f"{type(error).__name__}: {error}"
            answered.seconds = time.monotonic() - began
            if not answered.error or answered.has_tokens or answered.seconds > self._patience:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        tally.answered.append(answered)

    async def _ask_once(self, answered: Answered) -> None:
        asked = answered.asked
        began = time.monotonic()
        body = {**asked.body, **self._fields(asked)}
        async with self._session.post(self._url + asked.path, json=body) as response:
            if response.status != 200:
                answered.error = f"status {response.status}: {(await response.text())[:200]}"
            elif asked.is_stream:
                await _read_stream(response, answered, began)
            else:
                choice = (await response.json())["choices"][0]
                answered.text = choice["text"] if "text" in choice else choice["message"]["content"]
                answered.ids = choice.get("token_ids") or choice.get("response_token_ids") or []
                answered.first_token_seconds = time.monotonic() - began


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
        if not answered.has_tokens:
            answered.first_token_seconds = time.monotonic() - began
        for choice in event["choices"]:
            answered.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            answered.ids += choice.get("token_ids") or []
    answered.error = answered.error or "the stream ended without [DONE]"
