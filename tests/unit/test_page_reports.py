"""What engines say of a prompt's pages: read back as it was said, or refused; and what a router makes of it."""

from __future__ import annotations

import base64
import json
import random
import time

import msgspec
import pytest

from p2pkv.errors import ControlError
from p2pkv.instances.page_report import MOST_NAMES, PageReport, read_report, report_of
from p2pkv_proxy.named_pages import NamedPages
from p2pkv_proxy.prompts import Prompt, read_chat, read_completion

PAGE = 16


def names_of(text: str, tokens_a_word: int = 1) -> list[bytes]:
    """Name pages as an engine does whose tokens are words: each name covers all before it."""
    tokens = [word for word in text.split() for _ in range(tokens_a_word)]
    return [
        base64.b64encode(random.Random(" ".join(tokens[:end])).randbytes(24))
        for end in range(PAGE, len(tokens) + 1, PAGE)
    ]


def told(text: str) -> PageReport:
    names = names_of(text)
    return read_report(report_of("n", names, page_size=PAGE, n_tokens=len(text.split())))


def blocks(text: str) -> list[bytes]:
    return Prompt("", [text], None, is_stream=False, max_tokens=1).blocks()


def words(first: int, n: int, length: int = 7) -> str:
    return "".join(f"{number:0{length}} " for number in range(first, first + n))


def test_a_report_survives_json() -> None:
    text = words(0, 500)
    said = json.loads(json.dumps(report_of("a name", names_of(text), page_size=PAGE, n_tokens=500)))
    report = read_report(said)
    assert (report.namespace, report.tokens_a_name, report.n_tokens) == ("a name", PAGE, 500)
    assert report.names(1000) == names_of(text)
    assert report.names(3) == names_of(text)[:3]


def test_of_a_long_prompt_every_so_manyeth_page_is_named() -> None:
    names = [b"%08d" % number for number in range(5 * MOST_NAMES - 3)]
    report = read_report(report_of("n", names, page_size=PAGE, n_tokens=len(names) * PAGE + 1))
    assert report.n_names <= MOST_NAMES
    assert report.tokens_a_name == 5 * PAGE
    assert report.names(2) == [names[4], names[9]]


GOOD = report_of("n", [b"12345678"] * 4, page_size=PAGE, n_tokens=100)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"packed": "no base64!"},
        {"packed": "é" * 8},
        {"packed": 3},
        {"packed": "A" * (1 << 20)},
        {"name_size": 0},
        {"name_size": -8},
        {"name_size": 5},
        {"name_size": 1 << 70},
        {"tokens_a_name": 0},
        {"tokens_a_name": -16},
        {"tokens_a_name": 1 << 40},
        {"n_tokens": 3},
        {"n_tokens": 1 << 60},
        {"n_tokens": "many"},
        {"namespace": "n" * 5000},
        {"namespace": None},
    ],
)
def test_what_can_not_be_a_report_is_refused(change: dict[str, object]) -> None:
    read_report(GOOD)
    with pytest.raises(ControlError):
        read_report({**GOOD, **change})
    for nonsense in (None, [], "pages", 7):
        with pytest.raises(ControlError):
            read_report(nonsense)


def test_what_is_said_of_one_prompt_is_known_of_those_that_begin_alike() -> None:
    named, text = NamedPages(), words(0, 400)
    assert named.find(blocks(text)) is None
    named.learn(blocks(text), told(text))
    longer = named.find(blocks(text + "and a question that nobody has asked before, at some length " * 5))
    assert longer is not None
    assert longer.names == names_of(text)[: longer.n_names]
    assert longer.n_names >= len(names_of(text)) - 1
    assert named.find(blocks("another text " * 100)) is None


def test_where_prompts_part_is_learnt_from_their_names() -> None:
    # the common beginning has a token for 8 bytes, what follows one for 3: evenly shared out it would be far off
    named, system = NamedPages(), words(0, 160)
    for number in range(3):
        text = system + " ".join(f"{number}{digit % 10}" for digit in range(900))
        named.learn(blocks(text), told(text))
    known = named.find(blocks(system + "something else " * 100))
    assert known is not None
    assert abs(known.n_names - 10) <= 1
    assert known.names[:10] == names_of(system)[: min(10, known.n_names)]


def test_pages_that_were_renamed_are_known_by_their_new_names() -> None:
    named, text = NamedPages(), words(0, 400)
    named.learn(blocks(text), told(text))
    renamed = msgspec.structs.replace(told(text), packed=bytes(reversed(told(text).packed)))
    named.learn(blocks(text), renamed)
    known = named.find(blocks(text))
    assert known is not None
    assert known.names == renamed.names(1000)


def test_a_lie_is_forgotten_with_the_next_honest_report() -> None:
    named, text = NamedPages(), words(0, 1000)
    lie = msgspec.structs.replace(told(text), packed=told(text).packed[: told(text).name_size])
    named.learn(blocks(text), lie)
    for _ in range(2):
        named.learn(blocks(text), told(text))
    whole, half = named.find(blocks(text)), named.find(blocks(words(0, 500) + "x" * 1000))
    assert whole is not None
    assert half is not None
    assert whole.n_names == len(names_of(text))
    assert abs(half.n_names - len(names_of(text)) // 2) <= 2


def test_memory_is_bounded_in_texts_and_in_names() -> None:
    named = NamedPages(most_marks=100, most_nbytes=50_000)
    for number in range(200):
        text = words(number * 1000, 300)
        named.learn(blocks(text), told(text))
        assert len(named) <= 100
        assert named.nbytes <= 50_000
        assert named.find(blocks(text)) is not None
    assert named.find(blocks(words(0, 300))) is None


def test_a_report_is_not_believed_for_ever() -> None:
    now = 0.0
    named, text = NamedPages(now=lambda: now), words(0, 300)
    named.learn(blocks(text), told(text))
    now = 10_000.0
    assert named.find(blocks(text)) is None


@pytest.mark.parametrize(
    "field", [{"cache_salt": "s"}, {"model": "adapter"}, {"tools": [{"type": "function"}]}]
)
def test_what_changes_an_engines_pages_makes_another_text(field: dict[str, object]) -> None:
    chat = {"messages": [{"role": "user", "content": "a text that is long enough " * 20}]}
    assert read_chat(chat).blocks() == read_chat({**chat, "temperature": 1.0}).blocks()  # type: ignore[dict-item]
    assert read_chat(chat).blocks()[0] != read_chat({**chat, **field}).blocks()[0]  # type: ignore[dict-item]


def test_a_chat_is_no_completion_and_calls_of_tools_are_text() -> None:
    text = "a text that is long enough " * 20
    chat = {"messages": [{"role": "user", "content": text}]}
    assert read_completion({"prompt": f"user: {text}\n"}).blocks()[0] != read_chat(chat).blocks()[0]  # type: ignore[arg-type]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": str(n) * 200}]} for n in (1, 2)]
    assert read_chat({"messages": [calls[0]]}).blocks() != read_chat({"messages": [calls[1]]}).blocks()  # type: ignore[dict-item]


def test_a_prompt_of_12_000_tokens_costs_little() -> None:
    named, text = NamedPages(), words(0, 6000)
    all_blocks, report = blocks(text), told(text)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        named.learn(all_blocks, report)
        named.find(all_blocks)
        best = min(best, time.perf_counter() - began)
    assert best < 0.005  # 0.2 ms on an idle core
