"""The names of a prompt's pages, computed as the engines do: from its tokens, each page's of all before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2pkv.instances.heartbeat import Instance

MAX_PAGES = 2048
"""Of a prompt; the directory's largest question has 8,192."""
_BEGIN = 256


@dataclass(frozen=True, slots=True)
class Keying:
    """How an instance names its pages: SHA-256 over the tokens as 4 bytes each, chained from page to page.

    SGLang's HiCache and the demo's engine name them so.
    """

    namespace: str
    page_size: int
    tokenizer: str
    prefix: str

    @classmethod
    def of(cls, instance: Instance) -> Keying | None:
        """Return an instance's, or None if it doesn't tell."""
        if not instance.page_size or not instance.node_id:
            return None
        return cls(instance.namespace, instance.page_size, instance.tokenizer, instance.key_prefix)

    def tokens(self, part: str | Sequence[int]) -> Sequence[int] | None:
        """Return a prompt's token ids; None for a text whose tokenizer is not known here."""
        if not isinstance(part, str):
            return part
        return [_BEGIN, *part.encode()] if self.tokenizer == "bytes" else None

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """Return the key of every whole page, the first :data:`MAX_PAGES` of them."""
        raw = np.asarray(tokens[: MAX_PAGES * self.page_size], "<u4").tobytes()
        size = 4 * self.page_size
        keys = []
        digest = b""
        for first in range(0, len(raw) - size + 1, size):
            digest = hashlib.sha256(digest + raw[first : first + size]).digest()
            keys.append(self.prefix + digest.hex())
        return keys
