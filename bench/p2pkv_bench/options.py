"""Options that are lists with commas in between."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.errors import ConfigError
from p2pkv.values import parse_size


def names_of(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in ``text``; ConfigError for one that is not known."""
    for name in _parts(text):
        if name not in known:
            raise ConfigError(f"{option} takes {', '.join(known)}; not {name!r}")
    return tuple(_parts(text))


def numbers_of(option: str, text: str, *, most: int = 4096) -> tuple[int, ...]:
    """Return the numbers in ``text``, from 1 to ``most`` each."""
    for part in _parts(text):
        if not part.isdecimal() or not 1 <= int(part) <= most:
            raise ConfigError(f"{option} takes numbers from 1 to {most}, not {part!r}")
    return tuple(int(part) for part in _parts(text))


def sizes_of(option: str, text: str, working_set: int) -> tuple[int, ...]:
    """Return the page sizes in ``text``, in bytes; there must be room for some of each in ``working_set``."""
    sizes = tuple(parse_size(option, part) for part in _parts(text))
    for nbytes in sizes:
        if nbytes < 64 or nbytes % 64 or nbytes > working_set // 8:
            raise ConfigError(f"{option} takes multiples of 64 bytes up to {working_set // 8}, not {nbytes}")
    return sizes


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
