"""From the names that engines have for blocks to the keys by which the directory knows their pages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from p2pkv.indexer.refusal import bad, unanswerable
from p2pkv.page import KEY_BYTES, Keys, Namespace

_TOKEN_BYTES = 4


class PageIds:
    """Of an instance that has not told how its pages are called: hashes are the keys themselves, as KV events say."""

    n_parts = 1

    def keys(self, hashes: Sequence[str]) -> Keys:
        """Return ``(n, 16)`` keys."""
        for at, name in enumerate(hashes):
            if len(name) != 2 * KEY_BYTES:
                raise bad(
                    f"hash {at} has {len(name)} digits: without a `namespace` in its registration an instance's "
                    f"hashes are page ids as KV events have them, {2 * KEY_BYTES} hexadecimal digits"
                )
        return np.frombuffer(_bytes_of(hashes), np.uint8).reshape(-1, KEY_BYTES)

    def hashes_of(self, tokens: Sequence[int], block_size: int) -> list[str]:
        """Refuse: what tokens are called is not known."""
        raise unanswerable(
            "what this instance calls the blocks of these tokens is not known here: its registration has no "
            "`namespace`; ask /query_by_hash"
        )


class Prefixed:
    """Names are hashed in ``namespace``, each behind every one of the prefixes: a block's parts, all of which count."""

    def __init__(
        self, namespace: Namespace, kind: str, *, texts: Sequence[str] = (), raw: Sequence[bytes] = ()
    ) -> None:
        """Prefixes that are ``texts`` stand before hashes as text, ``raw`` ones before hashes as bytes; one kind."""
        self._namespace = namespace
        self._kind = kind
        self._texts, self._raw = texts, raw
        self.n_parts = len(texts or raw)

    def keys(self, hashes: Sequence[str]) -> Keys:
        """Return ``(n * n_parts, 16)`` keys, the parts of a block behind each other."""
        if self._texts:
            return self._namespace.hash([prefix + name for name in hashes for prefix in self._texts])
        raw = [_bytes_of([name]) for name in hashes]
        return self._namespace.hash([prefix + name for name in raw for prefix in self._raw])

    def hashes_of(self, tokens: Sequence[int], block_size: int) -> list[str]:
        """Return what SGLang's HiCache calls the whole blocks of ``tokens``; for others refuse."""
        if self._kind.lower() != "sglang" or not self._texts:
            raise unanswerable(
                f"what an instance of type {self._kind!r} calls the blocks of these tokens is not known here, only "
                "what SGLang does; ask /query_by_hash with the engine's own hashes"
            )
        return chained(tokens, block_size)


def chained(tokens: Sequence[int], block_size: int) -> list[str]:
    """Return the names of whole blocks: SHA-256 of the name before and of the tokens, as 4 bytes each."""
    raw = np.asarray(tokens, "<u4").tobytes()
    step = _TOKEN_BYTES * block_size
    names: list[str] = []
    digest = b""
    for first in range(0, len(raw) - step + 1, step):
        digest = hashlib.sha256(digest + raw[first : first + step]).digest()
        names.append(digest.hex())
    return names


def _bytes_of(hashes: Sequence[str]) -> bytes:
    digits = "".join(hashes)
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    if 2 * len(raw) != len(digits):  # fromhex skips spaces
        raise bad("a hash is not an even number of hexadecimal digits")
    return raw
