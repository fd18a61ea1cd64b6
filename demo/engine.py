"""An engine serves prompts: it computes KV pages, or gets them from a store, and generates with them.

Every page has the same bits whoever computed it (see ``model``), so an engine with a store and one without
generate the same tokens. A page the store doesn't have is computed: a miss costs time, nothing else.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from demo.model import PAGE, Model, Tokens
from demo.paged_kv import PagedKV, Spans, page_keys

STORE_TIMEOUT = 2.0
"""Seconds a call to the store may take; guess, far above what any call takes."""

Progress = Callable[[str, int, int], None]
"""Called with what is being counted, how many are done and how many there are."""

Outcomes = NDArray[np.uint8]
"""One of p2pkv's ``Outcome`` a page."""


class PageStore(Protocol):
    """Pages by key. Every call returns by its timeout."""

    def publish(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        """Let others fetch these pages from now on."""
        ...

    def fetch(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        """Bring these pages into local memory; what a missed page's memory then holds is undefined."""
        ...

    def exists(self, keys: Sequence[str], timeout: float) -> Outcomes:
        """Say which pages can be fetched."""
        ...


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill did. Only whole pages count; what is behind them is left to the decode node."""

    n_reused: int
    """Tokens whose pages came from the store."""
    n_computed: int
    n_published: int
    """Pages."""
    fetch_seconds: float
    compute_seconds: float
    publish_seconds: float


@dataclass(frozen=True, slots=True)
class Generated:
    """What a decode did; ``first_token_seconds`` counts from the call and includes fetching and computing."""

    tokens: Tokens
    kv_digest: str
    """Digest of the prompt's whole pages: equal to another engine's only if every bit is."""
    n_reused: int
    n_computed: int
    fetch_seconds: float
    first_token_seconds: float
    seconds: float


class Engine:
    """A model and its paged KV cache, with a store to share pages through or, without one, alone.

    One call at a time.
    """

    def __init__(self, model: Model, kv: PagedKV, store: PageStore | None) -> None:
        """Own nothing: all three are the caller's."""
        self._model = model
        self._kv = kv
        self._store = store

    def prefill(self, prompt: Tokens, progress: Progress) -> Prefilled:
        """Make every whole page of the prompt fetchable: reuse what is there, compute the rest."""
        keys = page_keys(prompt, PAGE)
        with closing(_Sequence(self._model, self._kv, prompt)) as sequence:
            started = time.monotonic()
            n_reused = self._fetch(keys, sequence)
            fetched = time.monotonic()
            sequence.compute(n_reused, len(keys), progress)
            computed = time.monotonic()
            n_published = self._publish(keys, n_reused, sequence)
            published = time.monotonic()
        return Prefilled(
            n_reused=n_reused * PAGE,
            n_computed=(len(keys) - n_reused) * PAGE,
            n_published=n_published,
            fetch_seconds=fetched - started,
            compute_seconds=computed - fetched,
            publish_seconds=published - computed,
        )

    def generate(
        self,
        prompt: Tokens,
        n_new: int,
        progress: Progress,
        *,
        after_fetch: Callable[[Spans], None] = lambda spans: None,
    ) -> Generated:
        """Generate ``n_new`` tokens, at least one, behind a prompt of at least one.

        ``after_fetch`` is called with the spans of the fetched pages, for tests that spoil them.
        """
        started = time.monotonic()
        # the last token is always computed: the new one comes from its hidden state, which no page holds
        keys = page_keys(prompt[:-1], PAGE)
        with closing(_Sequence(self._model, self._kv, prompt)) as sequence:
            n_reused = self._fetch(keys, sequence)
            fetched = time.monotonic()
            after_fetch(sequence.spans(0, n_reused))
            sequence.compute(n_reused, _n_pages(prompt), progress)
            sequence.append_next()
            first_token = time.monotonic()
            for n_done in range(1, n_new):
                progress("tokens generated", n_done, n_new)
                sequence.compute(_n_pages(sequence.tokens) - 1, _n_pages(sequence.tokens), _silent)
                sequence.append_next()
            progress("tokens generated", n_new, n_new)
            finished = time.monotonic()
            return Generated(
                tokens=sequence.tokens[len(prompt) :],
                kv_digest=sequence.digest(len(keys)),
                n_reused=n_reused * PAGE,
                n_computed=len(prompt) - n_reused * PAGE,
                fetch_seconds=fetched - started,
                first_token_seconds=first_token - started,
                seconds=finished - started,
            )

    def _fetch(self, keys: Sequence[str], sequence: _Sequence) -> int:
        """Fetch the sequence's first pages as far as the store has them without a gap; return how many."""
        if self._store is None or not keys:
            return 0
        n_there = _n_leading(self._store.exists(keys, STORE_TIMEOUT))
        spans = sequence.spans(0, n_there)
        return _n_leading(self._store.fetch(keys[:n_there], spans, STORE_TIMEOUT)) if n_there else 0

    def _publish(self, keys: Sequence[str], first: int, sequence: _Sequence) -> int:
        if self._store is None or first == len(keys):
            return 0
        outcomes = self._store.publish(keys[first:], sequence.spans(first, len(keys)), STORE_TIMEOUT)
        return int(outcomes.sum())


class _Sequence:
    """The tokens of one request and the pages they hold."""

    def __init__(self, model: Model, kv: PagedKV, prompt: Tokens) -> None:
        self.tokens = list(prompt)
        self._model = model
        self._kv = kv
        self._pages = kv.take(_n_pages(prompt))

    def close(self) -> None:
        """Give the pages back."""
        self._kv.give_back(self._pages)

    def spans(self, first: int, end: int) -> Spans:
        return self._kv.spans(self._pages[first:end])

    def digest(self, end: int) -> str:
        """Hash the bytes of the pages before ``end``."""
        digest = hashlib.sha256()
        for page in self._pages[:end]:
            digest.update(self._kv.k[page])
            digest.update(self._kv.v[page])
        return digest.hexdigest()

    def compute(self, first: int, end: int, progress: Progress) -> None:
        """Compute the pages from ``first`` on up to ``end``; those before must be there."""
        for page in range(first, end):
            tokens = self.tokens[page * PAGE : (page + 1) * PAGE]
            self._hidden = self._model.run_page(tokens, self._pages[: page + 1], self._kv)
            progress("pages computed", page + 1 - first, end - first)

    def append_next(self) -> None:
        """Choose the token behind the last one, whose page was computed last."""
        last = (len(self.tokens) - 1) % PAGE
        self.tokens.append(self._model.next_token(self._hidden[last]))
        if _n_pages(self.tokens) > len(self._pages):
            self._pages += self._kv.take(1)


def _n_pages(tokens: Tokens) -> int:
    """Pages the tokens need, the last one perhaps not full."""
    return -(-len(tokens) // PAGE)


def _n_leading(outcomes: Outcomes) -> int:
    """Count the hits before the first miss."""
    return int(np.logical_and.accumulate(outcomes != 0).sum())


def _silent(_what: str, _n_done: int, _n_all: int) -> None:
    """Report no progress."""
