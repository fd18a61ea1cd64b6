"""What engines of tests generate: it follows from the prompt alone, so that a test can tell a wrong token."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from p2pkv.instances.page_report import report_of


def tokens_of(prompt: object, n: int) -> list[str]:
    """What any engine generates behind a prompt."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [f"{digest[i % 64]}{i} " for i in range(n)]


FIRST_ID = 256
"""Ids below are bytes of prompts; of the others each is of one token at one place."""
_STOPPING = 61
"""Prompts that end by themselves do so within so many tokens."""


def ids_of(prompt: object, n: int) -> list[int]:
    """The ids of the tokens that any engine generates behind a prompt."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    return [FIRST_ID + 16 * i + int(digest[i % 64], 16) for i in range(n)]


def prompt_ids(prompt: object) -> list[int]:
    """A prompt's tokens: its own, or the bytes of its JSON."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return list(json.dumps(prompt).encode())


def stop_of(prompt: object) -> int:
    """Behind so many tokens an answer ends by itself, where engines stop."""
    return int(hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:6], 16) % _STOPPING + 1


PAGE_BYTES = 64


def page_names(prompt: str) -> list[bytes]:
    """How engines name the pages of a prompt, of 64 bytes each and 16 tokens: each name covers all before it."""
    data, names, digest = prompt.encode(), [], b""
    for first in range(0, len(data) - PAGE_BYTES + 1, PAGE_BYTES):
        digest = hashlib.blake2b(digest + data[first : first + PAGE_BYTES], digest_size=16).digest()
        names.append(digest)
    return names


def honest_pages(prompt: str) -> dict[str, object]:
    """What an engine says of a prompt's pages that tells the truth."""
    return report_of("n", page_names(prompt), page_size=16, n_tokens=len(prompt.encode()) // 4 + 1)


class Stream:
    """One answer in events. ``tokens`` are all from the first on, of which ``first`` are in the prompt."""

    def __init__(self, path: str, prompt: object, tokens: list[str], first: int, *, differs: bool) -> None:
        self.is_chat = path == "/v1/chat/completions"
        self.prompt = prompt
        self.tokens = tokens
        self.first = first
        self._ids = ids_of(prompt, len(tokens))
        if differs:
            self.tokens, self._ids = (
                tokens[:first] + tokens[first:][::-1],
                self._ids[:first] + self._ids[first:][::-1],
            )
        self._given = prompt_ids(prompt) + self._ids[:first]
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        self.head = {"id": f"cmpl-{secrets.token_hex(8)}", "object": kind}

    @property
    def usage(self) -> dict[str, int]:
        n_prompt, n_new = len(self._given), len(self.tokens) - self.first
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}

    def beginning(self, *, is_told: bool) -> dict[str, Any]:
        """A chat's first event, which says whose answer it is."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        return {**self.head, "choices": [choice]} | ({"prompt_token_ids": self._given} if is_told else {})

    def event(self, at: int, end: int, *, lags: bool, is_told: bool) -> dict[str, Any]:
        """Tokens from ``at`` to ``end``."""
        begin, until = at, end
        if lags:
            while begin > self.first and self._is_held(begin - 1):
                begin -= 1
            while until > begin and self._is_held(until - 1):
                until -= 1
        text = "".join(self.tokens[begin:until])
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if is_told:
            choice["token_ids"] = self._ids[at:end]
            if at == self.first and not self.is_chat:
                choice["prompt_token_ids"] = self._given
        return {**self.head, "choices": [choice]}

    def _is_held(self, i: int) -> bool:
        return i < len(self.tokens) - 1 and self._ids[i] % 4 == 0
