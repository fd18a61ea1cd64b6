"""A hand-off as it travels from prefill to decode, in ``kv_transfer_params``: all that decode needs to find the blocks.

The prefill instance puts it into its response, whoever routes requests puts it into the decode instance's request, and
nothing else ties the two together: request ids differ between instances. It comes from outside, so every field is
checked, and the prompt's digest makes sure that the blocks are those of the prompt they came with.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.shares import Share, Split

VERSION = 7
"""Of the hand-off's fields. Another one is refused with both named; fields that are not known are ignored."""

OFFER_NBYTES = 4 << 20
"""What an offer may have of several layers. The layers of one come together, so small ones let a model begin early, and
each costs both sides some tens of microseconds. A guess."""

_MAX_NAME, _MAX_LAYOUT, _MAX_COUNT = 400, 4096, 4096
_KEY = "p2pkv"
"""Of ``kv_transfer_params``, beside vLLM's own keys."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The node of one rank of the prefill instance."""

    node_id: str
    boot_epoch: int
    """What an earlier boot of the node offered is gone."""
    layout: str
    """How its caches lie: with pipeline parallelism each rank has layers of its own, and not all as many."""
    shares: tuple[Share, ...]
    """What of the model it holds, by group of layers."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """The offered blocks of one request."""

    name: str
    """Of the offers, the same on every rank."""
    ranks: tuple[Rank, ...]
    """Stage after stage of the pipeline."""
    split: Split
    """How the ranks of a stage share the heads."""
    n_tokens: int
    """The blocks hold the KV of so many tokens; the last block may be part full."""
    prompt: str
    """:func:`prompt_digest` of these tokens."""
    fingerprint: Mapping[str, object]
    """What all ranks have in common."""

    def to_params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the response, which are those of the decode request."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            _KEY: {
                "version": VERSION,
                "name": self.name,
                "ranks": [
                    [rank.node_id, str(rank.boot_epoch), rank.layout, msgspec.to_builtins(rank.shares)]
                    for rank in self.ranks
                ],
                "split": [self.split.tp_size, self.split.n_heads],
                "n_tokens": self.n_tokens,
                "prompt": self.prompt,
                "fingerprint": dict(self.fingerprint),
            },
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Handoff:
        """Take a request's ``kv_transfer_params``. Raises :class:`~p2pkv.errors.UsageError` naming what is wrong."""
        given = params.get(_KEY)
        if not isinstance(given, Mapping):
            raise UsageError("kv_transfer_params has no 'p2pkv'; pass on what the prefill instance returned")
        if given.get("version") != VERSION:
            raise UsageError(
                f"the hand-off has version {given.get('version')!r}, this instance knows {VERSION}"
            )
        try:
            ranks = tuple(
                Rank(
                    _name(node_id),
                    int(boot),
                    _name(layout, _MAX_LAYOUT),
                    msgspec.convert(shares, tuple[Share, ...]),
                )
                for node_id, boot, layout, shares in given["ranks"]
            )
            tp_size, n_heads = (_count(number) for number in given["split"])
            name, n_tokens, prompt = _name(given["name"]), int(given["n_tokens"]), _name(given["prompt"])
            fingerprint = dict(given["fingerprint"])
        except (KeyError, TypeError, ValueError, OverflowError, msgspec.ValidationError) as error:
            raise UsageError(f"the hand-off is malformed: {type(error).__name__}: {error}") from error
        if not ranks or n_tokens <= 0:
            raise UsageError(f"the hand-off names {len(ranks)} ranks and {n_tokens} tokens")
        return cls(name, ranks, Split(tp_size, n_heads), n_tokens, prompt, fingerprint)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
        raise ValueError(f"not a number from 1 to {_MAX_COUNT}: {value!r:.80}")
    return value


def _name(value: object, longest: int = _MAX_NAME) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise ValueError(f"not a name of 1 to {longest} characters: {value!r:.80}")
    value.encode()  # JSON can say halves of surrogate pairs, which no name has
    return value


def draw_name(request_id: str) -> str:
    """Return a name that no other hand-off has, and that nobody guesses."""
    readable = request_id.encode("ascii", "replace").decode()[: _MAX_NAME // 2]
    return f"{readable}/{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one offer of a hand-off holds: some rows of each of its blocks, block after block."""

    name: str
    rows: range
    """Numbers of a block's rows: those of layers that follow each other."""


def offers(name: str, group: int, n_blocks: int, row_nbytes: Sequence[int]) -> Iterator[Stretch]:
    """Yield the offers that a hand-off of a group consists of, the first layers' first.

    ``row_nbytes`` are the lengths of a block's rows. Both sides count alike: an offer has as many layers as stay below
    :data:`OFFER_NBYTES`, one at least.
    """
    for rows in _runs(row_nbytes, OFFER_NBYTES // n_blocks) if n_blocks else ():
        yield Stretch(f"{name}/{group}/{rows.start}", rows)


def _runs(row_nbytes: Sequence[int], limit: int) -> Iterator[range]:
    """Cut a block's rows into runs of ``limit`` bytes at most, but of one row at least."""
    first = nbytes = 0
    for row, length in enumerate(row_nbytes):
        if row > first and nbytes + length > limit:
            yield range(first, row)
            first, nbytes = row, 0
        nbytes += length
    yield range(first, len(row_nbytes))


def prompt_digest(tokens: Sequence[int], others: Sequence[str] = ()) -> str:
    """Return what tells prompts apart; ``others`` is what the KV depends on besides the tokens."""
    digest = hashlib.blake2b(np.asarray(tokens, "<i8").tobytes(), digest_size=16)
    for other in others:
        digest.update(hashlib.blake2b(other.encode()).digest())
    return digest.hexdigest()
