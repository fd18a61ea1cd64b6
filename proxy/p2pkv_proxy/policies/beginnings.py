"""Who was sent which beginnings of prompts.

The trie is kept flat: a block's hash covers all blocks before it, so that a hash stands for a path. What an instance
really still has is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

MOST_BLOCKS = 200_000
"""About 70 MiB, or 6 million tokens of text; the ones longest unused are forgotten."""
_NOBODY: frozenset[str] = frozenset()


class Beginnings:
    """A memory of what was sent where, of bounded size."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._sent: OrderedDict[bytes, set[str]] = OrderedDict()
        self._most_blocks = most_blocks

    def lengths(self, blocks: Sequence[bytes], among: Collection[str]) -> dict[str, int]:
        """Return how many of ``blocks`` each of ``among`` was sent, of those that were sent some."""
        found: dict[str, int] = {}
        left = set(among)
        for depth, block in enumerate(blocks):
            holders = self._sent.get(block, _NOBODY)
            if (
                left <= holders
            ):  # nearly always: a long prompt has thousands of blocks, and few places where it parts
                continue
            here = left & holders
            if depth:
                found.update(dict.fromkeys(left - here, depth))
            left = here
            if not left:
                return found
        found.update(dict.fromkeys(left, len(blocks)))
        return found if blocks else {}

    def remember(self, blocks: Sequence[bytes], instance_id: str) -> None:
        """Note that an instance was sent these."""
        for block in blocks:
            if (holders := self._sent.get(block)) is None:
                self._sent[block] = {instance_id}
            else:
                holders.add(instance_id)
                self._sent.move_to_end(block)
        while len(self._sent) > self._most_blocks:
            self._sent.popitem(last=False)

    def forget(self, instance_id: str) -> None:
        """Drop an instance that is gone."""
        for block in [block for block, holders in self._sent.items() if instance_id in holders]:
            self._sent[block].discard(instance_id)
            if not self._sent[block]:
                del self._sent[block]
