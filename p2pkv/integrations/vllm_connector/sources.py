"""From which prefill ranks a decode rank takes what it wants, if their instances share the model otherwise.

What can't be taken is refused before anybody is told, in one sentence that says what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.vllm_connector.caches import GroupCaches, KVCaches
from p2pkv.integrations.vllm_connector.groups import Group
from p2pkv.integrations.vllm_connector.handoff import Handoff, Rank
from p2pkv.integrations.vllm_connector.messages import Blocks
from p2pkv.integrations.vllm_connector.shares import Pair, Place, Share, givers, names
from p2pkv.integrations.vllm_connector.tiles import Granules, Tiles
from p2pkv.integrations.vllm_connector.wants import MAX_RANKS, Want, WantedGroup, part_of
from p2pkv.transfers import HeadMap


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one offer that a prefill rank makes when it has heard what is wanted."""

    source: Rank
    name: str
    rows: NDArray[np.int64]
    owners: NDArray[np.int64]
    """The block that each row is of."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of whom."""

    wants: tuple[tuple[Rank, Want], ...]
    parts: tuple[Part, ...]


def has_equal_share(handoff: Handoff, place: Place) -> bool:
    """Whether the prefill rank of the same number holds the very blocks that this one does."""
    return (
        handoff.split.tp_size == place.split.tp_size
        and place.rank < len(handoff.ranks)
        and handoff.ranks[place.rank].shares == place.shares
    )


def plan(
    handoff: Handoff, place: Place, wanted: Sequence[Blocks], groups: Sequence[Group], caches: KVCaches
) -> Plan:
    """Say what to ask of which prefill ranks for ``wanted``. Raises UsageError if it can't be had."""
    if place.rank >= MAX_RANKS:
        raise UsageError(
            f"this is rank {place.rank}; instances that share a model unequally have {MAX_RANKS} ranks at most"
        )
    heads = handoff.split.map_to(place.split)
    _check(handoff, place, heads)
    by_group = {blocks.group: blocks for blocks in wanted}
    wants: list[tuple[Rank, Want]] = []
    parts: list[Part] = []
    for tp_rank, source in _that_hear(handoff, place, heads):
        asked, rows_of = [], {}
        for number, (share, held) in enumerate(zip(place.shares, caches.groups, strict=True)):
            pair = Pair.of(heads, tp_rank, place.tp_rank, source.shares[number], share)
            blocks = by_group.get(number)
            granules = Granules(pair.granule, 0, 0)
            if held is not None and pair.layers and blocks is not None:
                granules = _granules(groups[number], share, pair, blocks, handoff.n_tokens)
                rows_of[number] = _rows(held, pair, granules, blocks)
            asked.append(WantedGroup(share, granules.first, granules.n))
        want = Want(place.rank, place.tp_rank, place.split.tp_size, tuple(asked))
        wants.append((source, want))
        parts += [
            Part(source, part_of(handoff.name, want, number), rows, owners)
            for number, (rows, owners) in rows_of.items()
            if len(rows)
        ]
    return Plan(tuple(wants), tuple(parts))


def _numbered(handoff: Handoff) -> Iterator[tuple[int, Rank]]:
    """Yield the ranks with their numbers among those that share the heads of a layer."""
    for number, rank in enumerate(handoff.ranks):
        yield number % handoff.split.tp_size, rank


def _that_hear(handoff: Handoff, place: Place, heads: HeadMap) -> Iterator[tuple[int, Rank]]:
    """Yield those of ``place``'s layers that are to hear of it, though it may take nothing from some."""
    hearing = givers(heads, place.tp_rank)
    for tp_rank, rank in _numbered(handoff):
        if tp_rank in hearing and any(map(_have_layers_in_common, rank.shares, place.shares)):
            yield tp_rank, rank


def _have_layers_in_common(one: Share, other: Share) -> bool:
    return not set(names(one.layers)).isdisjoint(names(other.layers))


def _check(handoff: Handoff, place: Place, heads: HeadMap) -> None:
    """Raise UsageError if something that this rank holds is not to be had of prefill's ranks, once each."""
    if len(handoff.ranks) % handoff.split.tp_size or any(
        len(rank.shares) != len(place.shares) for rank in handoff.ranks
    ):
        raise UsageError(
            f"prefill has {len(handoff.ranks)} ranks of which {handoff.split.tp_size} share the heads, with "
            f"{len(handoff.ranks[0].shares)} groups of layers; here are {len(place.shares)}"
        )
    for number, share in enumerate(place.shares):
        for tp_rank in heads.sources(place.tp_rank):
            found: list[str] = []
            for at, rank in _numbered(handoff):
                if at == tp_rank and _have_layers_in_common(rank.shares[number], share):
                    if reason := share.difference(rank.shares[number]):
                        raise UsageError(reason)
                    found += names(rank.shares[number].layers)
            for layer in names(share.layers):
                if found.count(layer) != 1:
                    raise UsageError(
                        f"{found.count(layer)} of prefill's stages have layer {layer}, which is here"
                    )


def _granules(group: Group, share: Share, pair: Pair, blocks: Blocks, n_tokens: int) -> Granules:
    """Return which stretches of the prompt's tokens the wanted blocks need."""
    size = pair.granule
    needed = replace(group, block_size=size).needed(n_tokens)
    per_block = share.block_tokens // size
    first = max(needed.start, blocks.first * per_block)
    last = min(needed.stop, (blocks.first + len(blocks.ids)) * per_block)
    return Granules(size, first, max(0, last - first)) if last > first else Granules(size, 0, 0)


def _rows(
    held: GroupCaches, pair: Pair, granules: Granules, blocks: Blocks
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the granules go, and the blocks of the rows."""
    assert isinstance(held.tiles, Tiles), "else its blocks can be handed over whole only"
    owners = held.tiles.owners(granules, blocks.first, blocks.ids)
    rows = held.tiles.rows(
        held.numbers(pair.layers), pair.to_heads, granules, owners, is_by_head=pair.is_by_head
    )
    return rows, np.repeat(owners, pair.rows_per_granule)
