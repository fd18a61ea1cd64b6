"""Streams that outlive their instance: when a decode fails, another pair goes on where it has stopped.

A stream is continued by its tokens, never by its text, which an engine might cut into other tokens. Engines that are
asked for it tell them (``return_token_ids``): the next pair gets the prompt's tokens and those generated so far as its
prompt, and has as many fewer to generate.

Text may lag behind tokens: of a character that takes two of them nothing is said after the first. So a stream goes on
behind the last token whose text was surely all out. What the client has of later ones is generated once more, compared,
and left out; where it differs the stream breaks off. No token is ever wrong, doubled or lost.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from p2pkv.instances.heartbeat import Mode
from p2pkv.message_types import worked_out
from p2pkv_proxy.call import Call
from p2pkv_proxy.continuation import request_for
from p2pkv_proxy.prompts import Body, Json, read_completion

_CHAT = "/v1/chat/completions"
_TOLD_DELTAS = frozenset({"role", "content"})
"""What a chat's delta may say. Of reasoning and of calls of tools tokens alone say too little."""
_HEAD = ("id", "object", "created", "model")
_MOST_LATIN = 0x2E80
"""SGLang says a part of what ends within a character: up to a space, or to a Chinese character."""


class DivergedError(Exception):
    """The next instance generates other tokens than the client has."""


class SaidError(Exception):
    """An event says that the engine has failed, or can't be read."""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, object] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


@worked_out
class _Event(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class Lasting:
    """One stream: its tokens so far, and what the client has of them."""

    def __init__(self, call: Call) -> None:
        """Follow the answer to ``call``, for which it is sound (:func:`~p2pkv_proxy.continuation.is_sound`)."""
        self._first = call
        self._is_chat = call.path == _CHAT
        self._wants_ids = bool(call.body.get("return_token_ids"))
        options = call.body.get("stream_options")
        self._wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._limit = call.prompt.max_tokens
        self._mode = Mode.VLLM
        self._prompt: list[int] | None = None
        self._tokens: list[int] = []
        """What was generated and sent."""
        self._n_clean = 0
        """How many of them another instance can go on behind."""
        self._unclean = ""
        """The text that the client has of the others."""
        self._at = 0
        """How many the present instance has generated, or was given."""
        self._given = 0
        """How many of them it was given."""
        self._due = ""
        """Text that it has to generate once more before it says news."""
        self._head: Body = {}
        """What is the same in all events."""
        self._is_finished = False
        self._has_usage = False
        self._is_done = False
        self.is_lost = False
        """It can't be continued: its engine does not say what is needed."""
        self.n_resumed = 0
        self._wrong: SaidError | DivergedError | None = None

    @property
    def needs_no_look(self) -> bool:
        """Whether the rest may be passed on as it comes."""
        return self.is_lost and self.n_resumed == 0

    @property
    def can_resume(self) -> bool:
        """Whether it can go on elsewhere now."""
        return self._prompt is not None and not self.is_lost

    def call(self, mode: Mode) -> Call:
        """Return what an instance is asked at first: to say its tokens too."""
        self._mode = mode
        if self._is_chat and mode is Mode.SGLANG:  # which refuses to stream a chat with its tokens
            self.is_lost = True
        if self.is_lost:
            return self._first
        return replace(self._first, body=self._first.body | {"return_token_ids": True})

    def resume(self, model: str) -> Call:
        """Return what another instance is asked for, to go on. ``model``: of the one that has failed."""
        assert self._prompt is not None
        self.n_resumed += 1
        n = self._n_clean
        self._at = self._given = n
        self._due = self._unclean
        body = request_for(
            self._first.body, [*self._prompt, *self._tokens[:n]], n_generated=n, limit=self._limit
        )
        prompt = read_completion(body)
        prompt.session = self._first.prompt.session
        prompt.only = model, self._mode
        return replace(self._first, path="/v1/completions", body=body, prompt=prompt)

    def ending(self) -> bytes | None:
        """Return the rest of a stream whose tokens are all there; None if some are missing."""
        if self._is_done:
            return b""
        rest = []
        if not self._is_finished:
            if self._n_clean < self._limit:
                return None
            choice: Body = {"index": 0, "finish_reason": "length", "logprobs": None}
            choice |= {"delta": {"content": ""}} if self._is_chat else {"text": ""}
            rest.append(_encoded({**self._head, "choices": [choice]}))
        if self._wants_usage and not self._has_usage:
            n_prompt, n_new = len(self._prompt or ()), len(self._tokens)
            usage: Body = {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_new,
                "total_tokens": n_prompt + n_new,
            }
            rest.append(_encoded({**self._head, "choices": [], "usage": usage}))
        return b"".join((*rest, b"data: [DONE]\n\n"))

    def take(self, events: bytes) -> bytes:
        """Take note of an engine's whole events; return what the client gets of them.

        It must get that whatever follows: what is wrong with an event is raised by :meth:`check`.
        """
        taken = []
        try:
            for event in events.split(b"\n\n"):
                if event:
                    taken.append(self._take(event + b"\n\n"))
        except (SaidError, DivergedError) as error:
            self._wrong = error
        return b"".join(taken)

    def check(self) -> None:
        """Raise :class:`SaidError` or :class:`DivergedError` if an event was wrong."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            raise wrong

    def _take(self, raw: bytes) -> bytes:
        if self.needs_no_look or not raw.startswith(b"data: "):
            return raw
        if raw == b"data: [DONE]\n\n":
            self._is_done = True
            return raw
        try:
            told: Json = msgspec.json.decode(raw[6:])
            if not isinstance(told, dict):
                return self._lose(raw)
            if told.get("error") is not None:
                raise SaidError(raw[6:300].decode(errors="replace").strip())
            event = msgspec.convert(told, _Event)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._lose(raw)
        if not self._head:
            self._head = {name: told[name] for name in _HEAD if name in told}
        if self.n_resumed:
            self._sum_usage(told.get("usage"))
        if not event.choices:
            self._has_usage = self._has_usage or "usage" in told
            return self._told(told, raw)
        return self._take_choice(told, event, raw)

    def _take_choice(self, told: Body, event: _Event, raw: bytes) -> bytes:
        choice = event.choices[0]
        if self._prompt is None:
            self._prompt = event.prompt_token_ids or choice.prompt_token_ids
        text = choice.text
        if self._is_chat and not self.n_resumed:
            delta = choice.delta or {}
            if any(delta[name] for name in delta if name not in _TOLD_DELTAS):
                return self._lose(raw)
            said = delta.get("content")
            text = said if isinstance(said, str) else ""
        tokens = choice.token_ids
        if len(event.choices) > 1 or text is None or (text and (tokens is None or self._prompt is None)):
            return self._lose(raw)
        tokens = tokens or []
        new_text, new_tokens = self._note(text, tokens)
        if choice.finish_reason is not None:
            self._is_finished = True
            if self._due or self._at < len(self._tokens):
                raise DivergedError("it ends before the client's part does")
        elif (text or tokens) and not (new_text or new_tokens):
            return b""
        listed = told["choices"]
        assert isinstance(listed, list)
        kept = listed[0]
        assert isinstance(kept, dict)
        if self.n_resumed or not self._wants_ids:
            told["choices"] = [self._rewritten(kept, new_text, new_tokens)]
        return self._told(told, raw)

    def _note(self, text: str, tokens: list[int]) -> tuple[str, list[int]]:
        """Take note of what an event says; return what of it the client does not have."""
        known = self._tokens[self._at : self._at + len(tokens)]
        if known != tokens[: len(known)]:
            raise DivergedError("it generates other tokens than the client has")
        new_tokens = tokens[len(known) :]
        self._tokens += new_tokens
        self._at += len(tokens)
        n_known = min(len(self._due), len(text))
        if self._due[:n_known] != text[:n_known]:
            raise DivergedError("it generates another text than the client has")
        self._due = self._due[n_known:]
        new_text = text[n_known:]
        if len(tokens) == 1 and self._is_all_out(text):
            self._n_clean, self._unclean = self._at, self._due
        else:
            self._unclean += new_text
        return new_text, new_tokens

    def _is_all_out(self, text: str) -> bool:
        """Whether an instance that says this of one token has no text left that it did not say."""
        if self._mode is not Mode.SGLANG:
            return text != ""
        return text != "" and not text[-1].isspace() and ord(text[-1]) < _MOST_LATIN

    def _rewritten(self, choice: Body, text: str, tokens: list[int]) -> Body:
        """Return a choice as the first instance would have told it, of what is new."""
        choice.pop("prompt_token_ids", None)
        if not self._wants_ids:
            choice.pop("token_ids", None)
        elif choice.get("token_ids") is not None:
            choice["token_ids"] = [*tokens]
        if self.n_resumed and self._is_chat:
            choice.pop("text", None)
            choice["delta"] = {"content": text}
        elif self.n_resumed:
            choice["text"] = text
        return choice

    def _told(self, told: Body, raw: bytes) -> bytes:
        if self._wants_ids and not self.n_resumed:
            return raw
        told.pop("prompt_token_ids", None)
        return _encoded(told | self._head)

    def _sum_usage(self, usage: Json) -> None:
        """Count what other instances have generated as generated."""
        if not isinstance(usage, dict):
            return
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            usage["prompt_tokens"] = prompt - self._given
            usage["completion_tokens"] = completion + self._given

    def _lose(self, raw: bytes) -> bytes:
        """Follow it no longer. Behind another instance's part it can't be passed on as it comes."""
        if self.n_resumed:
            raise SaidError("an event that can't be read")
        self.is_lost = True
        return raw


def _encoded(event: Body) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
