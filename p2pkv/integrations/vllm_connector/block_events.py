"""What vLLM's own KV events tell of blocks in p2pkv's memory and on its disks: of those that all ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pkv.integrations.vllm_connector import installed
from p2pkv.integrations.vllm_connector.block_contents import BlockContents, Contents
from p2pkv.integrations.vllm_connector.residents import BlockName, Change


class BlockEvents:
    """Used by the scheduler's thread alone."""

    def __init__(self) -> None:
        self._ranks: list[frozenset[int]] = []  # by group, those that have a part of its blocks
        self._parts: dict[tuple[str, BlockName], set[int]] = {}
        self._events: list[Any] = []
        self.contents = BlockContents()
        """What is in blocks: to be told before they are published."""

    def connect(self, ranks: Sequence[frozenset[int]]) -> None:
        """Take which ranks have a part of a block, by group."""
        self._ranks = list(ranks)

    def hear(self, changes: Sequence[Change]) -> None:
        """Take what workers have reported. A block is there once its last part is, and goes with the first one."""
        whole: dict[tuple[bool, str, int], list[bytes]] = {}
        for change in changes:
            place = (change.medium, change.block)
            parts = self._parts.setdefault(place, set())
            was_whole = parts == self._ranks[change.block.group]
            (parts.add if change.is_stored else parts.discard)(change.rank)
            is_whole = parts == self._ranks[change.block.group]
            if not parts:
                del self._parts[place]
            if is_whole != was_whole:
                kind = (is_whole, change.medium, change.block.group)
                if whole and next(reversed(whole)) != kind:
                    self._flush(whole)  # events of a block keep their order
                whole.setdefault(kind, []).append(change.block.hash)
        self._flush(whole)
        self.contents.prune(self._parts.keys())

    def _flush(self, whole: dict[tuple[bool, str, int], list[bytes]]) -> None:
        for (is_stored, medium, group), hashes in whole.items():
            if not is_stored:
                self._events.append(installed.blocks_removed(hashes, medium, group))
                continue
            for run in self.contents.runs(group, hashes):
                self._events.append(_stored(run, medium, group))
        whole.clear()

    def take(self) -> list[Any]:
        """Return vLLM's events since the last time."""
        events, self._events = self._events, []
        return events


def _stored(run: list[tuple[bytes, Contents | None]], medium: str, group: int) -> Any:
    known = [contents for _, contents in run if contents is not None]
    return installed.blocks_stored(
        [block_hash for block_hash, _ in run],
        medium,
        group,
        before=known[0].before if known else None,
        tokens=[token for contents in known for token in contents.tokens],
        lora=known[0].lora if known else None,
        extra=[contents.extra for contents in known],
    )
