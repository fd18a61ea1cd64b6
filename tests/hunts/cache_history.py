"""What was published and taken back when, by whichever thread: from that follows what a hit may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hunts.frame import Broken, Tally

PAGE = 24 * 1024
"""Long enough that a packed page takes fewer granules of the pool."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_WORDS = np.arange(1, PAGE // 8 + 1, dtype=np.uint64) * _MIX
_LIKE = np.uint64(0x00FF00FF00FF00FF)
"""Pages differ in half of their bytes, so that some of a batch are compressed."""
_VARIED, _FLOATS = np.uint64(0x83FF_83FF_83FF_83FF), np.uint64(0x3C00_3C00_3C00_3C00)
"""The bits that differ, and are the same, in bfloat16 numbers of few exponents, so that some are packed."""


def page_of(key: int, version: int) -> NDArray[np.uint8]:
    """Return the bytes: the first word names the page, and all others follow from it."""
    salt = np.uint64(key << 32 | version)
    words = _WORDS ^ (salt * _MIX)
    if version % 4 in (0, 1):
        words = words & _VARIED | _FLOATS
    elif version % 4 == 2:
        words = (_WORDS * (salt * _MIX)) & _LIKE
    words[0] = salt
    return words.view(np.uint8)


@dataclass(slots=True)
class Span:
    """When a call ran; it has not ended while ``ended`` is infinite."""

    began: float
    ended: float = float("inf")
    what: str = ""


@dataclass(slots=True)
class History:
    """Thread-safe.

    A hit of a version is wrong if a call took its key back that began after the publish had ended, and ended before the
    look began.
    """

    tally: Tally
    lock: threading.Lock = field(default_factory=threading.Lock)
    published: dict[tuple[int, int], Span] = field(default_factory=dict)
    taken_back: dict[int, list[Span]] = field(default_factory=dict)
    cleared: list[Span] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    last_version: int = 0

    def note(self, step: str) -> None:
        self.steps.append(step)

    @contextmanager
    def publishing(self, keys: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """Give new bytes to publish under these keys."""
        span = Span(time.monotonic())
        memory = np.empty((len(keys), PAGE), np.uint8)
        with self.lock:
            for row, key in zip(memory, keys, strict=True):
                self.last_version += 1
                row[:] = page_of(key, self.last_version)
                self.published[key, self.last_version] = span
            span.what = f"publish {list(keys)} up to version {self.last_version}"
            self.note(span.what)
        yield memory
        span.ended = time.monotonic()

    @contextmanager
    def taking_back(self, keys: Sequence[int] | None) -> Iterator[None]:
        """Take back these keys, or all."""
        span = Span(time.monotonic(), what="clear" if keys is None else f"retract {list(keys)}")
        with self.lock:
            self.note(span.what)
        yield
        span.ended = time.monotonic()
        with self.lock:
            if keys is None:
                self.cleared.append(span)
            for key in keys or ():
                self.taken_back.setdefault(key, []).append(span)

    def check(
        self,
        keys: Sequence[int],
        pages: NDArray[np.uint8],
        hits: NDArray[np.uint8],
        began: float,
        where: str,
    ) -> None:
        """Judge what a look that began then has found."""
        for row, key, hit in zip(pages, keys, hits, strict=True):
            self.tally["pages"] += 1
            if not hit:
                continue
            self.tally["hits"] += 1
            name = int(row[:8].view(np.uint64)[0])
            version = name & 0xFFFFFFFF
            with self.lock:
                span = self.published.get((name >> 32, version))
                ends = [one for one in (*self.taken_back.get(key, ()), *self.cleared) if one.ended < began]
            if name >> 32 != key or span is None or not np.array_equal(row, page_of(key, version)):
                raise self.broken(f"{where}: key {key} is a hit with bytes that nobody published under it")
            for end in ends:
                if end.began > span.ended:
                    raise self.broken(
                        f"{where}: key {key} is a hit with version {version}, which '{end.what}' took back"
                    )

    def broken(self, what: str) -> Broken:
        return Broken(what + "; steps: " + "; ".join(self.steps[-60:]))
