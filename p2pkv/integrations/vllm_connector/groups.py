"""The groups of a model's layers: each has block tables of its own, and keeps other blocks of a prompt.

Layers of full attention keep all blocks. Those of a window let go what no token to come looks back at, and those with a
state keep that of the last token alone. So what has to be there after the first ``n`` tokens differs by group, and it
is that which is handed off, looked for and loaded (:meth:`Group.needed`).

A block may belong to one group at a time: all of them take theirs from one pool, and its block 0 is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from p2pkv.errors import ConfigError

NO_BLOCK = 0
"""Stands in a block table for a block that was let go, or was never needed."""


class Kind(Enum):
    """What a group keeps of a prompt."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


_KINDS: dict[str, Kind] = {
    "FullAttentionSpec": Kind.FULL,
    "MLAAttentionSpec": Kind.FULL,
    "SinkFullAttentionSpec": Kind.FULL,
    "SlidingWindowSpec": Kind.WINDOW,
    "ChunkedLocalAttentionSpec": Kind.WINDOW,
    "MambaSpec": Kind.STATE,
}
"""By vLLM's names. Of all others it is not known which blocks they keep."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table."""

    kind: Kind
    block_size: int
    """Tokens of a block."""
    window: int = 0
    """Tokens that a token looks back at, itself included; 0 where it is not a sliding window."""
    chunk: int = 0
    """Tokens of a chunk of which a token sees those before it; 0 where there are none."""
    layers: tuple[str, ...] | None = None
    """Names, as vLLM registers their caches; None: all."""

    def needed(self, n_tokens: int) -> range:
        """Return the numbers of the blocks that tokens after the first ``n_tokens`` are computed from."""
        if self.kind is Kind.STATE:
            n_skipped = n_tokens - 1
        elif self.chunk:
            n_skipped = n_tokens // self.chunk * self.chunk
        elif self.kind is Kind.WINDOW:
            n_skipped = n_tokens - self.window + 1
        else:
            n_skipped = 0
        return range(max(0, n_skipped) // self.block_size, -(-n_tokens // self.block_size))

    def missing(self, n_local: int, n_tokens: int) -> range:
        """Return the numbers of those that are needed after ``n_tokens`` and not known from the first ``n_local``."""
        needed = self.needed(n_tokens)
        return range(max(needed.start, n_local // self.block_size), needed.stop)

    def hashes(self, hashes: Sequence[bytes], hash_size: int, numbers: range) -> list[bytes]:
        """Return the names of blocks. ``hashes`` has one for each ``hash_size`` tokens, and what comes before them."""
        n = self.block_size // hash_size
        return [bytes(hashes[(number + 1) * n - 1]) for number in numbers]


@dataclass(frozen=True, slots=True)
class Groups:
    """All of a model's."""

    each: tuple[Group, ...]

    @property
    def keeps_all(self) -> bool:
        """Whether all blocks of a prompt stay: then its last token can be computed again by who has the others' KV.

        Else it can't: a state has moved on, and a window has let its first tokens go.
        """
        return all(group.kind is Kind.FULL for group in self.each)

    @property
    def is_plain(self) -> bool:
        """Whether a block that failed to come says which tokens are missing, as vLLM has it only of one full group."""
        return len(self.each) == 1 and self.keeps_all

    @property
    def alignment(self) -> int:
        """After so many tokens, and multiples, all groups' blocks end."""
        return math.lcm(*(group.block_size for group in self.each))

    @property
    def kinds(self) -> str:
        """What each keeps of a prompt, whatever the size of its blocks."""
        return ", ".join(f"{g.kind.value}{_reach(g)}" for g in self.each)

    def __str__(self) -> str:
        return ", ".join(f"{g.kind.value} {g.block_size}{_reach(g)}" for g in self.each)


def _reach(group: Group) -> str:
    return f"/{group.window or group.chunk}" if group.window or group.chunk else ""


def read_groups(kv_cache_config: Any) -> Groups:
    """Take vLLM's groups. Raises :class:`~p2pkv.errors.ConfigError` for those that can't be served."""
    given = kv_cache_config.kv_cache_groups
    if not given:
        raise ConfigError("the model has no KV cache; there is nothing to hand off")
    for number, group in enumerate(given):
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise ConfigError(
                f"KV cache group {number} is not all in the memory of the model's device; p2pkv can't hand it off, "
                "serve the model without p2pkv"
            )
    return Groups(tuple(_read(group, number) for number, group in enumerate(given)))


def _read(given: Any, number: int) -> Group:
    names = getattr(given, "layer_names", None)
    layers = None if names is None else tuple(names)
    spec = given.kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    found = {_of(each, number, layers) for each in specs}
    if len(found) > 1:
        raise ConfigError(
            f"the layers of KV cache group {number} keep different blocks ({sorted(map(str, found))}); p2pkv can't "
            "hand them off, serve the model without it"
        )
    return found.pop()


def _of(spec: Any, number: int, layers: tuple[str, ...] | None) -> Group:
    kind = _KINDS.get(type(spec).__name__)
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        raise ConfigError(
            f"the layers of KV cache group {number} are of {type(spec).__name__}, and p2pkv knows which blocks of a "
            f"prompt are kept by {known} only; serve the model without it"
        )
    return Group(
        kind,
        spec.block_size,
        window=_window(spec),
        chunk=spec.attention_chunk_size if type(spec).__name__ == "ChunkedLocalAttentionSpec" else 0,
        layers=layers,
    )


def _window(spec: Any) -> int:
    """Return how many tokens a sliding window keeps. Full attention may note one too, whose blocks vLLM keeps."""
    if type(spec).__name__ != "SlidingWindowSpec":
        return 0
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
