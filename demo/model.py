"""A small transformer in numpy whose results do not depend on how a prompt is cut into pieces.

Floating-point sums depend on the order of their terms, and a BLAS chooses that order by the shapes it is
given. So there is one way only to run this model: over one whole page of tokens (:data:`PAGE` rows, the
unknown ones padded) and all pages before it. The shapes of every call then follow from the page's place in
the sequence alone, and a page has the same bits whether the prompt was computed in one go, resumed behind
pages that came from another node, or generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from demo.paged_kv import PagedKV

PAGE = 16
"""Tokens a page."""
BOS = 256
"""The token every prompt starts with, so that the empty prompt has something to compute. Others are bytes."""
PRINTABLE = range(0x20, 0x7F)
"""The tokens the model may generate."""

Floats = NDArray[np.float32]
Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model and the seed of its weights: two models of equal shape are equal."""

    n_layers: int = 8
    width: int = 512
    n_heads: int = 8
    max_tokens: int = 2048
    seed: int = 20

    @property
    def page(self) -> tuple[int, int, int]:
        """The shape of one page's keys; its values have the same."""
        return self.n_layers, PAGE, self.width

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page, keys and values together."""
        return 2 * self.n_layers * PAGE * self.width * 4

    def describe(self) -> str:
        """Name everything that makes the bytes of a KV page incompatible; part of p2pkv's namespace."""
        return f"l{self.n_layers}-d{self.width}-h{self.n_heads}-p{PAGE}-f32-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    qkv: Floats
    out: Floats
    up: Floats
    down: Floats


def encode(text: bytes) -> Tokens:
    """Turn a prompt into tokens: one a byte, behind a :data:`BOS`."""
    return [BOS, *text]


def decode(tokens: Sequence[int]) -> bytes:
    """Turn tokens back into bytes; a :data:`BOS` has none."""
    return bytes(token for token in tokens if token != BOS)


class Model:
    """A decoder-only transformer with rotary positions; random weights, the same in every process."""

    def __init__(self, shape: Shape) -> None:
        """Draw the weights; takes about a second for the default shape."""
        random = np.random.Generator(np.random.PCG64(shape.seed))

        def weights(rows: int, columns: int, gain: float = 1.0) -> Floats:
            drawn = random.standard_normal((rows, columns), dtype=np.float32)
            scaled: Floats = drawn * np.float32(gain / np.sqrt(rows))
            return scaled

        d = shape.width
        self.shape = shape
        self._embedding = weights(BOS + 1, d, gain=float(np.sqrt(BOS + 1)))
        self._layers = [
            # a gain of 2 makes attention pick out a few tokens: the text then depends on the whole prompt
            Layer(
                qkv=weights(d, 3 * d, gain=2.0),
                out=weights(d, d),
                up=weights(d, 4 * d),
                down=weights(4 * d, d),
            )
            for _ in range(shape.n_layers)
        ]
        self._unembedding = weights(d, len(PRINTABLE))
        self._cos, self._sin = _rotations(shape)

    def run_page(self, tokens: Sequence[int], pages: Sequence[int], kv: PagedKV) -> Floats:
        """Compute the last page of a sequence, write its KV and return its ``(PAGE, width)`` hidden states.

        ``tokens`` are those of that page, 1 to ``PAGE`` of them; ``pages`` are the sequence's pages in
        ``kv``, all but the last one filled. Rows beyond ``tokens`` are padding: finite, and of no influence
        on those before.
        """
        assert 1 <= len(tokens) <= PAGE, len(tokens)
        padded = np.zeros(PAGE, dtype=np.intp)
        padded[: len(tokens)] = tokens
        first = (len(pages) - 1) * PAGE
        hidden: Floats = self._embedding[padded]
        for index, layer in enumerate(self._layers):
            query, key, value = np.split(_normalized(hidden) @ layer.qkv, 3, axis=1)
            kv.k[pages[-1], index] = self._rotated(key, first)
            kv.v[pages[-1], index] = value
            mixed = self._attend(self._rotated(query, first), kv.k[pages, index], kv.v[pages, index])
            hidden = hidden + mixed @ layer.out
            hidden = hidden + np.maximum(_normalized(hidden) @ layer.up, 0) @ layer.down
        return hidden

    def next_token(self, hidden: Floats) -> int:
        """Return the most likely printable token behind the one with this ``(width,)`` hidden state."""
        logits = _normalized(hidden[np.newaxis]) @ self._unembedding
        return PRINTABLE[int(np.argmax(logits))]

    def _attend(self, query: Floats, keys: Floats, values: Floats) -> Floats:
        """Causal attention of one page's queries over the ``(n_pages, PAGE, width)`` keys of a sequence."""
        n_heads, d = self.shape.n_heads, self.shape.width
        q = query.reshape(PAGE, n_heads, -1).transpose(1, 0, 2)
        k = keys.reshape(-1, n_heads, d // n_heads).transpose(1, 2, 0)
        v = values.reshape(-1, n_heads, d // n_heads).transpose(1, 0, 2)
        scores = q @ k * np.float32((d // n_heads) ** -0.5)
        scores[:, :, -PAGE:] += _FUTURE
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Floats = (scores @ v).transpose(1, 0, 2).reshape(PAGE, d)
        return mixed

    def _rotated(self, x: Floats, first: int) -> Floats:
        """Turn the ``(PAGE, width)`` queries or keys of the positions from ``first`` on by their position."""
        cos, sin = self._cos[first : first + PAGE, np.newaxis], self._sin[first : first + PAGE, np.newaxis]
        a, b = np.split(x.reshape(PAGE, self.shape.n_heads, -1), 2, axis=2)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2).reshape(PAGE, -1)


_FUTURE: Floats = np.triu(np.full((PAGE, PAGE), -np.inf, dtype=np.float32), k=1)
"""Added to the scores within a page: no token sees those behind it."""


def _normalized(x: Floats) -> Floats:
    scale: Floats = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * scale


def _rotations(shape: Shape) -> tuple[Floats, Floats]:
    """Cosine and sine of every position's angles: two ``(max_tokens, width / n_heads / 2)`` arrays."""
    half = shape.width // shape.n_heads // 2
    angles = np.outer(np.arange(shape.max_tokens), 10_000.0 ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
