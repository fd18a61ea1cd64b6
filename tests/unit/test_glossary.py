"""docs/glossary.md can be searched and believed: sorted, each word once, and each where it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| (?!word \|)([a-z-]+) \| (.+) \| (.+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
)


def test_the_words_are_sorted_and_each_is_there_once() -> None:
    words = [word for word, _, _ in ROWS]
    assert len(words) > 20
    assert words == sorted(set(words))


def test_every_line_of_the_table_is_a_word_with_a_meaning_and_a_place() -> None:
    lines = re.findall(r"^\| (?!word \|)", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(lines) == len(ROWS)


def test_every_word_is_used_where_the_glossary_says() -> None:
    for word, _, places in ROWS:
        for place in re.findall(r"`([^`]+)`", places):
            text = (ROOT / place).read_text().lower()
            assert word.replace("-", "") in text.replace("-", ""), f"{place} does not speak of {word}"
