"""The demo's engine: with a store or without, and whatever the store loses, it generates the same."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from demo.engine import Engine, Outcomes
from demo.model import PAGE, Model, Shape, encode
from demo.paged_kv import OutOfPagesError, PagedKV, Spans

SHAPE = Shape(n_layers=2)
PROMPT = encode(b"a prompt of a few pages, which two engines have to read: " * 2)
N_PAGES = len(PROMPT) // PAGE
N_NEW = 2 * PAGE + 3


class DictStore:
    """Pages in a dict: what p2pkv does, within one process."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.lost: set[str] = set()
        """Keys that exist until they are fetched."""

    def publish(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        for key, pieces in zip(keys, spans, strict=True):
            self.pages[key] = b"".join(ctypes.string_at(int(at), int(nbytes)) for at, nbytes in pieces)
        return np.ones(len(keys), dtype=np.uint8)

    def fetch(self, keys: Sequence[str], spans: Spans, timeout: float) -> Outcomes:
        return np.array([self._fetch(*page) for page in zip(keys, spans, strict=True)], dtype=np.uint8)

    def exists(self, keys: Sequence[str], timeout: float) -> Outcomes:
        return np.array([key in self.pages for key in keys], dtype=np.uint8)

    def _fetch(self, key: str, pieces: Spans) -> bool:
        is_lost = key in self.lost or key not in self.pages
        data = b"\xff" * int(pieces[:, 1].sum()) if is_lost else self.pages[key]
        for at, nbytes in pieces:
            ctypes.memmove(int(at), data[: int(nbytes)], int(nbytes))
            data = data[int(nbytes) :]
        return not is_lost


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE)


@pytest.fixture
def store() -> DictStore:
    return DictStore()


def engine(model: Model, store: DictStore | None, n_pages: int = 16) -> Engine:
    return Engine(model, PagedKV(n_pages, SHAPE.page), store)


def silent(_what: str, _n_done: int, _n_all: int) -> None:
    pass


def test_output_from_fetched_pages_is_that_of_one_engine_alone(model: Model, store: DictStore) -> None:
    alone = engine(model, None).generate(PROMPT, N_NEW, silent)

    prefilled = engine(model, store).prefill(PROMPT, silent)
    generated = engine(model, store).generate(PROMPT, N_NEW, silent)

    assert (prefilled.n_reused, prefilled.n_computed, prefilled.n_published) == (0, N_PAGES * PAGE, N_PAGES)
    assert (generated.n_reused, generated.n_computed) == (N_PAGES * PAGE, len(PROMPT) - N_PAGES * PAGE)
    assert generated.tokens == alone.tokens
    assert generated.kv_digest == alone.kv_digest
    assert len(alone.tokens) == N_NEW


def test_a_shared_prefix_is_fetched_and_only_the_rest_computed(model: Model, store: DictStore) -> None:
    longer = PROMPT + encode(b"and then it went on and on")[1:]
    engine(model, store).prefill(PROMPT, silent)

    prefilled = engine(model, store).prefill(longer, silent)
    generated = engine(model, store).generate(longer, N_NEW, silent)

    assert prefilled.n_reused == N_PAGES * PAGE
    assert prefilled.n_computed == (len(longer) // PAGE - N_PAGES) * PAGE
    alone = engine(model, None).generate(longer, N_NEW, silent)
    assert (generated.tokens, generated.kv_digest) == (alone.tokens, alone.kv_digest)


@pytest.mark.parametrize("lost", range(N_PAGES))
def test_a_page_lost_before_it_was_fetched_is_computed(model: Model, store: DictStore, lost: int) -> None:
    engine(model, store).prefill(PROMPT, silent)
    store.lost = {list(store.pages)[lost]}

    generated = engine(model, store).generate(PROMPT, N_NEW, silent)

    alone = engine(model, None).generate(PROMPT, N_NEW, silent)
    assert generated.n_reused == lost * PAGE
    assert (generated.tokens, generated.kv_digest) == (alone.tokens, alone.kv_digest)


def test_one_wrong_bit_of_a_fetched_page_shows_in_the_digest(model: Model, store: DictStore) -> None:
    engine(model, store).prefill(PROMPT, silent)

    def flip_lowest_bit(spans: Spans) -> None:
        ctypes.c_uint8.from_address(int(spans[-1, 1, 0])).value ^= 1

    spoiled = engine(model, store).generate(PROMPT, 1, silent, after_fetch=flip_lowest_bit)
    assert spoiled.kv_digest != engine(model, None).generate(PROMPT, 1, silent).kv_digest


@pytest.mark.parametrize("n_tokens", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_prompts_that_end_near_a_page_boundary_are_served(
    model: Model, store: DictStore, n_tokens: int
) -> None:
    prompt = PROMPT[:n_tokens]
    engine(model, store).prefill(prompt, silent)
    generated = engine(model, store).generate(prompt, 3, silent)
    assert generated.tokens == engine(model, None).generate(prompt, 3, silent).tokens
    assert generated.n_reused == (n_tokens - 1) // PAGE * PAGE


def test_an_engine_serves_any_number_of_prompts_from_a_small_cache(model: Model, store: DictStore) -> None:
    small = engine(model, store, n_pages=N_PAGES + 1)
    outputs = [small.generate(PROMPT, 3, silent).tokens for _ in range(5)]
    assert outputs == outputs[:1] * 5


def test_a_prompt_that_does_not_fit_is_refused_and_the_next_one_served(model: Model) -> None:
    small = engine(model, None, n_pages=2)
    with pytest.raises(OutOfPagesError):
        small.generate(PROMPT, 1, silent)
    assert small.generate(PROMPT[:PAGE], 1, silent).tokens


def test_progress_ends_at_the_number_of_tokens(model: Model) -> None:
    seen: list[tuple[str, int, int]] = []
    engine(model, None).generate(PROMPT, 4, lambda *progress: seen.append(progress))
    assert seen[-1] == ("tokens generated", 4, 4)
    assert ("pages computed", N_PAGES + 1, N_PAGES + 1) in seen
