"""Which part of a model's KV each rank of an instance holds, and what of it goes to which rank of another one.

Ranks share a model's layers (pipeline parallelism) and its heads (tensor parallelism); where there are more ranks than
heads, as there always are with MLA, ranks in a row hold copies. Prefill and decode instances may do so differently, and
may have blocks of other sizes. Then a decode rank takes what it needs from several prefill ranks, or a part of one:
which heads come from where is said by :class:`~p2pkv.transfers.HeadMap`. Both sides work out the rows between two
ranks from their two shares alone (:class:`Pair`), and number them alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.groups import Group, Kind
from p2pkv.integrations.vllm_connector.tiles import Tiles
from p2pkv.message_types import worked_out
from p2pkv.transfers import HeadMap, PageLayout

_NUMBER = re.compile(r"\d+")
_MOST = 1 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_MAX_LAYERS, _MAX_SPELLED = 4096, 4096


@worked_out
class Share(msgspec.Struct, frozen=True):
    """What one rank holds of one group of layers."""

    layers: Annotated[str, msgspec.Meta(max_length=_MAX_SPELLED)] = ""
    """Their names, as :func:`spell` has them; empty: none."""
    n_heads: _Count = 0
    tile_tokens: _Count = 0
    """Tokens that lie beside each other within a head."""
    block_tokens: _Count = 0
    cell_nbytes: _Count = 0
    """Bytes of one token of one head."""
    dtype: Annotated[str, msgspec.Meta(max_length=40)] = ""
    is_packed: bool = False
    """Whether a tile is packed as a whole: its tokens can't be told apart."""
    whole: Annotated[str, msgspec.Meta(max_length=400)] = ""
    """Why blocks can be handed over whole only, between ranks with equal shares; empty: they need not."""

    def difference(self, other: Share) -> str | None:
        """Say in one sentence why parts of ``other``, there, can't become parts of this one here, or None."""
        for where, share in (("there", other), ("here", self)):
            if share.whole:
                return f"blocks {where} can be handed over whole only: {share.whole}"
        if self.dtype != other.dtype:
            return f"KV is of {other.dtype} there and {self.dtype} here"
        if self.cell_nbytes != other.cell_nbytes:
            return f"a token of a head has {other.cell_nbytes} bytes there and {self.cell_nbytes} here"
        mine, theirs = self.tile_tokens, other.tile_tokens
        if mine == theirs:
            return None
        sizes = f"blocks hold {other.block_tokens} tokens there and {self.block_tokens} here"
        if self.is_packed or other.is_packed:
            return f"{sizes}, and attention on CPUs packs each as a whole"
        if not mine or not theirs or max(mine, theirs) % min(mine, theirs):
            return f"{sizes}, {theirs} and {mine} side by side, and neither is a multiple of the other"
        return None


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of an instance share the model's heads."""

    tp_size: int
    n_heads: int
    """KV heads of the model; 1 where every rank has all of the KV."""

    def map_to(self, other: Split) -> HeadMap:
        """Return which of these ranks' heads are which of the ``other``'s. Raises UsageError if that can't be said."""
        if self.n_heads != other.n_heads:
            raise UsageError(f"the model has {self.n_heads} KV heads there and {other.n_heads} here")
        for tp_size in (self.tp_size, other.tp_size):
            if tp_size % self.n_heads and self.n_heads % tp_size:
                raise UsageError(f"{self.n_heads} KV heads can't be shared among {tp_size} ranks evenly")
        return HeadMap(PageLayout("page_head", self.n_heads, 1, 1), self.tp_size, other.tp_size)


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of the model one rank holds."""

    rank: int
    """Its number in its instance: stage after stage of the pipeline, and within a stage by :attr:`tp_rank`."""
    split: Split
    shares: tuple[Share, ...]
    """By group of layers."""

    @property
    def tp_rank(self) -> int:
        """Its number among the ranks that share the heads of its layers."""
        return self.rank % self.split.tp_size


def share_of(tiles: Tiles | str, layers: Sequence[str], group: Group, split: Split, isa: str) -> Share:
    """Describe what a rank holds of a group of ``layers``; ``isa`` is by what attention packs blocks, if it does."""
    if group.kind is Kind.STATE:
        tiles = "a state can't be shared out anew"
    if isinstance(tiles, str):
        return Share(spell(layers), whole=tiles)
    whole, n_here = "", max(1, split.n_heads // split.tp_size)
    if tiles.n_heads != n_here:
        whole = f"its caches have {tiles.n_heads} heads, and {split.n_heads} among {split.tp_size} ranks are {n_here}"
    elif tiles.block_tokens != group.block_size:
        whole = f"a block of {group.block_size} tokens keeps {tiles.block_tokens}"
    return Share(
        spell(layers),
        tiles.n_heads,
        tiles.tile_tokens,
        tiles.block_tokens,
        tiles.cell_nbytes,
        tiles.dtype,
        bool(isa),
        whole,
    )


def takers(heads: HeadMap, from_rank: int) -> list[int]:
    """Return the decode ranks that a prefill rank hears of: those that take from it.

    One that holds copies of what others give hears of one rank all the same, so that it need not wait for more.
    """
    return heads.destinations(from_rank) or [from_rank * heads.to_tp // heads.from_tp]


def givers(heads: HeadMap, to_rank: int) -> list[int]:
    """Return the prefill ranks that hear of a decode rank: the other way round."""
    return [rank for rank in range(heads.from_tp) if to_rank in takers(heads, rank)]


@dataclass(frozen=True, slots=True)
class Pair:
    """The rows of one group between a prefill and a decode rank. Empty if it takes nothing from it."""

    layers: tuple[str, ...]
    """That both hold, in the order of their rows."""
    from_heads: range
    """Of those of the prefill rank."""
    to_heads: range
    """Of those of the decode rank: the same heads."""
    granule: int
    """Tokens of a row."""
    is_by_head: bool
    """Whether a row is one head: where tiles differ, heads lie beside each other on one side only."""

    @classmethod
    def of(cls, heads: HeadMap, from_rank: int, to_rank: int, there: Share, here: Share) -> Pair:
        """Pair two ranks, by their numbers among those that share the heads of a layer."""
        granule = min(there.tile_tokens, here.tile_tokens)
        is_by_head = there.tile_tokens != here.tile_tokens
        if from_rank not in heads.sources(to_rank):
            return cls((), range(0), range(0), granule, is_by_head)
        ours = set(names(here.layers))
        from_first, from_end = heads.heads(from_rank, heads.from_tp)
        to_first, to_end = heads.heads(to_rank, heads.to_tp)
        first, end = max(from_first, to_first), min(from_end, to_end)
        return cls(
            tuple(name for name in names(there.layers) if name in ours),
            range(first - from_first, end - from_first),
            range(first - to_first, end - to_first),
            granule,
            is_by_head,
        )

    @property
    def rows_per_granule(self) -> int:
        """How many rows the pair has of so many tokens."""
        return len(self.layers) * (len(self.to_heads) if self.is_by_head else 1)


def spell(layers: Sequence[str]) -> str:
    """Return layers' names in short, sorted: ``model.layers.*.attn:0-15,20``. The same for the same layers."""
    by_form: dict[str, list[int]] = {}
    for name in layers:
        number = _NUMBER.search(name)
        form = name if number is None else f"{name[: number.start()]}*{name[number.end() :]}"
        by_form.setdefault(form, []).append(-1 if number is None else int(number[0]))
    return ";".join(f"{form}:{_runs(sorted(numbers))}" for form, numbers in sorted(by_form.items()))


def _runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs if a >= 0)


def names(spelled: str) -> list[str]:
    """Return the names that :func:`spell` was given, sorted. Raises UsageError for what it did not write."""
    found: list[str] = []
    try:
        for part in filter(None, spelled.split(";")):
            form, _, runs = part.rpartition(":")
            if not runs:
                found.append(form)
            for run in filter(None, runs.split(",")):
                first, _, last = run.partition("-")
                numbers = range(int(first), int(last or first) + 1)
                if len(numbers) + len(found) > _MAX_LAYERS:
                    raise ValueError(f"more than {_MAX_LAYERS} layers")
                found += [form.replace("*", str(n), 1) for n in numbers]
    except ValueError as error:
        raise UsageError(f"layers {spelled!r:.80} can't be read: {error}") from error
    return found
