"""Who was sent which beginnings of prompts.

The trie is kept flat: a block's hash covers all blocks before it, so that a hash stands for a path. What an instance
really still has is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

MOST_BLOCKS = 200_000
"""About 30 MiB, or 6 million tokens of text; the ones longest unused are forgotten."""
_NOBODY: frozenset[str] = frozenset()


class Beginnings:
    """A memory of what was sent where, of bounded size.

    A long prompt has thousands of blocks, and few places where it parts from others: blocks that one prompt brought
    share one set of their instances, so that most of them need no look at that.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._sent: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._most_blocks = most_blocks

    def lengths(self, blocks: Sequence[bytes], among: Collection[str]) -> dict[str, int]:
        """Return how many of ``blocks`` each of ``among`` was sent, of those that were sent some."""
        found: dict[str, int] = {}
        left = set(among)
        before: frozenset[str] | None = None
        for depth, holders in enumerate(map(self._sent.get, blocks)):
            if holders is before and depth:
                continue
            before = holders
            here = left & (holders or _NOBODY)
            if depth:
                found.update(dict.fromkeys(left - here, depth))
            left = here
            if not left:
                return found
        found.update(dict.fromkeys(left, len(blocks)))
        return found if blocks else {}

    def remember(self, blocks: Sequence[bytes], instance_id: str) -> None:
        """Note that an instance was sent these."""
        sent = self._sent
        before: frozenset[str] | None = None
        holders = alone = frozenset((instance_id,))
        for block, known in zip(blocks, list(map(sent.get, blocks)), strict=True):
            if known is None:
                sent[block] = alone
                continue
            sent.move_to_end(block)
            if known is not before:
                before = known
                holders = known if instance_id in known else known | alone
            if holders is not known:
                sent[block] = holders
        while len(sent) > self._most_blocks:
            sent.popitem(last=False)

    def forget(self, instance_id: str) -> None:
        """Drop an instance that is gone."""
        for block in [block for block, holders in self._sent.items() if instance_id in holders]:
            if left := self._sent[block] - {instance_id}:
                self._sent[block] = left
            else:
                del self._sent[block]
