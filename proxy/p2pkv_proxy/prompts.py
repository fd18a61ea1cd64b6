"""A request as far as routing needs to understand it: model, length, and what its prompt begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from p2pkv.instances.heartbeat import Mode
from p2pkv_proxy.held import Held
from p2pkv_proxy.token_ids import MAX_BATCH, Id, TokenIds, decode_large

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | msgspec.Raw | None"
"""Raw are token ids of a large body, unchanged."""
Body: TypeAlias = "dict[str, Json]"

_LARGE = 1 << 20
"""Bytes from which on a body's token ids stay as they are."""
BYTES_A_TOKEN = 4
"""Of text in English, roughly; only relative sizes matter here."""
_DEFAULT_OUTPUT = 256
BLOCK_BYTES = 128
"""Of text that the prefix policies compare at a time: about 32 tokens."""
BLOCK_TOKENS = 32
_MOST_BLOCKS = 8192
"""Of a prompt, 262,144 tokens or a MiB of text: what is the same so far is not told apart."""
_CONTEXT = (
    "model",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "cache_salt",
    "lora_path",
)
_MEDIA_TOKENS = 1024
"""A picture, sound or film counts as so many. A guess: what a model makes of one, its bytes do not say."""


class MalformedError(ValueError):
    """The request is none; the message goes to the client."""


@dataclass(slots=True)
class Prompt:
    """One request's prompts: a text or token ids each. ``batch`` is None if there is one that is not in a list."""

    model: str
    parts: Sequence[str | Sequence[int]]
    batch: int | None
    is_stream: bool
    max_tokens: int
    n_samples: int = 1
    """Answers that are wanted to each prompt."""
    n_tokens: int = 0
    """Of all parts; an estimate where they are texts."""
    holdings: Held | None = None
    """What p2pkv nodes hold of the prompt's beginning; None: not known."""
    holdings_flaw: str = ""
    """Why it is not known."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Tokens of its beginning that each instance was sent before: what is assumed to be there if nobody knows."""
    session: str = ""
    """What the client says that this belongs to, of several requests."""
    is_for_one: bool = False
    """One instance gets the request as it is: nothing is handed over."""
    needs_whole_engine: bool = False
    """That instance must be able to compute the prompt and generate."""
    only: tuple[str, Mode] | None = None
    """Model and mode of the instances that may have it, if it is made of their tokens; None: any."""
    context: bytes = b""
    """What its pages depend on besides its text."""
    _blocks: list[bytes] | None = field(default=None, repr=False)

    @property
    def n_answers(self) -> int:
        """Sequences that the engine makes of it, over all prompts."""
        return (self.batch or 1) * self.n_samples

    @property
    def n_to_compute(self) -> int:
        """Tokens of the prompt that no node holds, as far as that is known."""
        return max(0, self.n_tokens - (self.holdings.total if self.holdings is not None else 0))

    def blocks(self) -> list[bytes]:
        """Return one hash for each block of the first part's beginning, of it and all before."""
        if self._blocks is None:
            self._blocks = _chained(self.parts[0], self.context) if self.parts else []
        return self._blocks


def decode_body(raw: bytes) -> Body:
    """Parse a request's body. Raises :class:`MalformedError`."""
    try:
        body: Json = msgspec.json.decode(raw) if len(raw) <= _LARGE else decode_large(raw)  # type: ignore[assignment]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise MalformedError("the body must be a JSON object")
    return body


def read_completion(body: Body) -> Prompt:
    """Understand ``/v1/completions``."""
    if "prompt" not in body:
        raise MalformedError("prompt is missing")
    parts, batch = _parts("prompt", body["prompt"])
    return _prompt(body, parts, batch, _limit(body, "max_tokens", 16), body)


def read_chat(body: Body) -> Prompt:
    """Understand ``/v1/chat/completions``."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise MalformedError("messages must be a list with at least one message")
    lines = []
    n_media = 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise MalformedError("every message is an object with a role")
        text, n = _content(message.get("content"))
        lines.append(f"{role}: {text}{_beside(message)}\n")
        n_media += n
    limit = _limit(body, "max_completion_tokens", _limit(body, "max_tokens", _DEFAULT_OUTPUT))
    prompt = _prompt(body, ["".join(lines)], None, limit, body)
    prompt.n_tokens += n_media * _MEDIA_TOKENS
    return prompt


def read_generate(body: Body) -> Prompt:
    """Understand SGLang's ``/generate``."""
    name = "input_ids" if body.get("input_ids") is not None else "text"
    if body.get(name) is None:
        raise MalformedError("text or input_ids is missing")
    parts, batch = _parts(name, body[name])
    sampling = body.get("sampling_params")
    if isinstance(sampling, list):  # SGLang wants the same n in all of them
        sampling = sampling[0] if sampling else None
    if not isinstance(sampling, dict):
        sampling = {}
    return _prompt(body, parts, batch, _limit(sampling, "max_new_tokens", 128), sampling)


def _prompt(
    body: Body, parts: Sequence[str | Sequence[int]], batch: int | None, limit: int, sampling: Body
) -> Prompt:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise MalformedError("model must be a string")
    is_stream = body.get("stream")
    if is_stream is not None and not isinstance(is_stream, bool):
        raise MalformedError("stream must be true or false")
    n_tokens = sum(-(-len(part) // BYTES_A_TOKEN) if isinstance(part, str) else len(part) for part in parts)
    return Prompt(
        model=model or "",
        parts=parts,
        batch=batch,
        is_stream=bool(is_stream),
        max_tokens=limit,
        n_samples=max(1, _limit(sampling, "n", 1)),
        n_tokens=n_tokens,
        context=_context(body),
    )


def _parts(name: str, value: Json) -> tuple[Sequence[str | Sequence[int]], int | None]:
    if isinstance(value, str):
        return [value], None
    if isinstance(value, msgspec.Raw):
        return [_ids(name, value)], None
    if not isinstance(value, list) or not value:
        raise MalformedError(f"{name} must be a text, token ids, or a list of those")
    if len(value) > MAX_BATCH and not isinstance(value[0], int):
        raise MalformedError(f"{name} has {len(value)} prompts; at most {MAX_BATCH}")
    if _are_ids(value):
        return [value], None  # type: ignore[list-item]
    parts = [_ids(name, part) if isinstance(part, msgspec.Raw) else part for part in value]
    for part in parts:
        if not isinstance(part, str | TokenIds) and not (isinstance(part, list) and part and _are_ids(part)):
            raise MalformedError(f"{name} must be a text, token ids, or a list of those")
    return parts, len(parts)  # type: ignore[return-value]


def _ids(name: str, json: msgspec.Raw) -> TokenIds:
    try:
        return TokenIds(bytes(json))
    except msgspec.ValidationError as error:
        raise MalformedError(f"{name} has what is no token id: {error}") from error


def _are_ids(values: list[Json]) -> bool:
    try:
        msgspec.convert(values, list[Id])  # there may be millions: no loop of Python's
    except msgspec.ValidationError:
        return False
    return True


def _beside(message: Body) -> str:
    """Return what a message says besides its text: calls of tools, and whose answer it is."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    return msgspec.json.encode(rest).decode() if rest else ""


def _content(content: Json) -> tuple[str, int]:
    """Return a message's text, and how many pictures and the like are in it; for each of these its digest is there."""
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list):
        return "" if content is None else msgspec.json.encode(content).decode(), 0
    found = []
    n_media = 0
    for part in content:
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            found.append(text)
        else:
            n_media += 1
            found.append(hashlib.blake2b(msgspec.json.encode(part), digest_size=16).hexdigest())
    return "".join(found), n_media


def _limit(body: Body, name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise MalformedError(f"{name} must be a number that is not negative, not {value!r}"[:200])
    return value


def _context(body: Body) -> bytes:
    """Digest what makes an engine see other tokens, or keep other pages, for the same text."""
    given = {name: body[name] for name in _CONTEXT if body.get(name) is not None}
    return hashlib.blake2b(msgspec.json.encode(["messages" in body, given]), digest_size=12).digest()


def _chained(part: str | Sequence[int], context: bytes) -> list[bytes]:
    if isinstance(part, str):
        data, size = part[: _MOST_BLOCKS * BLOCK_BYTES].encode(errors="surrogatepass"), BLOCK_BYTES
    else:
        ids = part.beginning if isinstance(part, TokenIds) else part
        data, size = np.asarray(ids[: _MOST_BLOCKS * BLOCK_TOKENS], "<u4").tobytes(), 4 * BLOCK_TOKENS
    blocks = []
    digest = context
    for first in range(0, min(len(data) - size + 1, _MOST_BLOCKS * size), size):
        digest = hashlib.blake2b(digest + data[first : first + size], digest_size=12).digest()
        blocks.append(digest)
    return blocks
