"""In what two namespaces differ: a page that one node publishes is never found by another whose namespace differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """Another namespace, and the words that differ: ``(what, here, there)``; empty texts for what one of them lacks."""

    namespace: str
    words: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        said = (
            f"{what + ' ' if what else ''}is {here or 'not there'} here and {there or 'not there'} there"
            for what, here, there in self.words
        )
        return "; ".join(said)


def differences(here: str, there: str) -> Difference:
    """Compare word by word: ``name=value`` by its name, others by their place."""
    ours, theirs = _words(here), _words(there)
    names = dict.fromkeys([*ours, *theirs])
    words = tuple(
        ("" if name.isdigit() else name, ours.get(name, ""), theirs.get(name, ""))
        for name in names
        if ours.get(name) != theirs.get(name)
    )
    return Difference(there, words)


def nearest(here: str, others: Iterable[str]) -> Difference | None:
    """Return how the namespace differs that differs in the fewest words."""
    return min((differences(here, other) for other in others), key=lambda d: len(d.words), default=None)


def _words(namespace: str) -> dict[str, str]:
    words: dict[str, str] = {}
    for place, word in enumerate(namespace.split(" ")):
        name, equals, value = word.partition("=")
        words[name if equals else str(place)] = value if equals else word
    return words
