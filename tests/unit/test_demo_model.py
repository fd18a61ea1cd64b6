"""The demo's transformer: a page has the same bits whoever computes it, and from whatever it goes on."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from demo.model import PAGE, Model, Shape, decode, encode
from demo.paged_kv import OutOfPagesError, PagedKV, page_keys
from demo.xpyd.waiting import WaitingModel

SHAPE = Shape(n_layers=2)
TOKENS = encode(bytes(np.random.default_rng(7).integers(0, 256, 5 * PAGE + 5, dtype=np.uint8)))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE)


def compute(model: Model, kv: PagedKV, pages: list[int], first: int) -> list[np.ndarray]:
    """Compute the pages of ``TOKENS`` from ``first`` on, in one go; return their hidden states."""
    return [
        model.run_page(TOKENS[i * PAGE : (i + 1) * PAGE], pages[: i + 1], kv)
        for i in range(first, len(pages))
    ]


def bits(kv: PagedKV, pages: list[int]) -> bytes:
    return kv.k[pages].tobytes() + kv.v[pages].tobytes()


def test_pages_resumed_behind_copied_ones_have_the_same_bits(model: Model) -> None:
    ours, theirs = PagedKV(6, SHAPE.page), PagedKV(9, SHAPE.page)
    pages, other_pages = [0, 1, 2, 3, 4, 5], [8, 1, 4, 0, 6, 3]
    hidden = compute(model, ours, pages, 0)
    for n_copied in range(1, len(pages)):
        theirs.k[other_pages[:n_copied]] = ours.k[pages[:n_copied]]
        theirs.v[other_pages[:n_copied]] = ours.v[pages[:n_copied]]

        resumed = compute(model, theirs, other_pages, n_copied)

        assert bits(theirs, other_pages) == bits(ours, pages)
        assert resumed[-1].tobytes() == hidden[-1].tobytes()


def test_pages_computed_token_by_token_have_the_same_bits(model: Model) -> None:
    at_once, one_by_one = PagedKV(6, SHAPE.page), PagedKV(6, SHAPE.page)
    pages = list(range(6))
    hidden = np.concatenate(compute(model, at_once, pages, 0))

    for n_tokens in range(1, len(TOKENS) + 1):
        last = (n_tokens - 1) // PAGE
        rows = model.run_page(TOKENS[last * PAGE : n_tokens], pages[: last + 1], one_by_one)
        row = (n_tokens - 1) % PAGE
        assert rows[row].tobytes() == hidden[n_tokens - 1].tobytes()

    assert bits(one_by_one, pages) == bits(at_once, pages)


def test_two_models_of_one_shape_are_equal(model: Model) -> None:
    ours, theirs = PagedKV(6, SHAPE.page), PagedKV(6, SHAPE.page)
    compute(model, ours, list(range(6)), 0)
    compute(Model(SHAPE), theirs, list(range(6)), 0)
    assert bits(ours, list(range(6))) == bits(theirs, list(range(6)))


def test_what_is_said_first_matters_to_the_end(model: Model) -> None:
    kv = PagedKV(6, SHAPE.page)
    before = compute(model, kv, list(range(6)), 0)[-1]
    kv.v[0, 0, 0, 0] *= 2
    assert compute(model, kv, list(range(6)), 1)[-1].tobytes() != before.tobytes()


@pytest.mark.parametrize("text", [b"", b"x", bytes(range(256)), "héllo 你好 🙂".encode()])
def test_text_survives_the_tokenizer(text: bytes) -> None:
    assert decode(encode(text)) == text


def test_the_empty_prompt_has_a_token() -> None:
    assert len(encode(b"")) == 1


def test_prompts_share_keys_as_far_as_they_share_whole_pages() -> None:
    other = list(TOKENS)
    other[3 * PAGE + 1] += 1
    ours, theirs = page_keys(TOKENS, PAGE), page_keys(other, PAGE)
    assert ours[:3] == theirs[:3]
    assert not set(ours[3:]) & set(theirs[3:])


def test_equal_pages_behind_different_ones_have_different_keys() -> None:
    block = [1] * PAGE
    assert len(set(page_keys(block * 4, PAGE))) == 4


@pytest.mark.parametrize(("n_tokens", "n_keys"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (32, 2)])
def test_only_whole_pages_have_keys(n_tokens: int, n_keys: int) -> None:
    assert len(page_keys([65] * n_tokens, PAGE)) == n_keys


def test_spans_say_where_the_bytes_of_a_page_are() -> None:
    kv = PagedKV(4, SHAPE.page)
    kv.k[2], kv.v[2] = 1.5, 2.5
    (key_span, value_span) = kv.spans([3, 2])[1]
    assert ctypes.string_at(int(key_span[0]), int(key_span[1])) == kv.k[2].tobytes()
    assert ctypes.string_at(int(value_span[0]), int(value_span[1])) == kv.v[2].tobytes()
    assert key_span[1] + value_span[1] == SHAPE.page_nbytes


def test_pages_given_back_forget_what_they_held() -> None:
    kv = PagedKV(1, SHAPE.page)
    pages = kv.take(1)
    kv.k[pages], kv.v[pages] = 1, 1
    kv.give_back(pages)
    assert kv.take(1) == pages
    assert np.isnan(kv.k[pages]).all()
    assert np.isnan(kv.v[pages]).all()


def test_a_full_cache_says_so_and_lends_nothing() -> None:
    kv = PagedKV(2, SHAPE.page)
    with pytest.raises(OutOfPagesError, match="needs 3 pages; 2 of 2"):
        kv.take(3)
    assert len(kv.take(2)) == 2


def test_a_waiting_model_takes_its_time_and_makes_up_for_late_wakings() -> None:
    clock = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds + 0.004  # the machine is late

    shape = Shape(n_layers=1, width=8, n_heads=1, max_tokens=64)
    model = WaitingModel(shape, 0.01, now=lambda: clock[0], sleep=sleep)
    kv = PagedKV(2, shape.page)
    first, second = pages = kv.take(2)
    model.run_page([1] * PAGE, [first], kv)
    hidden = model.run_page([2], pages, kv)
    assert np.isfinite(kv.k[[first, second]]).all()
    assert chr(model.next_token(hidden[0])) == " "
    assert slept[1] == pytest.approx(slept[0] - 0.004)
    clock[0] += 60.0  # idle; that is not made up for
    before = clock[0]
    for _ in range(10):
        model.run_page([1] * PAGE, [first], kv)
    assert clock[0] - before > 0.07
