"""KV hints of vLLM's requests: what a worker's node brings, keeps, shares and lets go as an orchestrator asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from p2pkv.integrations.kv_hints import Hints, Retain
from p2pkv.integrations.vllm_connector.groups import Groups
from p2pkv.integrations.vllm_connector.messages import Hinted, Pages
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.node import Node
from p2pkv.page import Outcome

_BRING_S = 1.0
"""How long a retention waits for pages that other instances have: whoever publishes after it waits as well."""
_MOST_KEPT = 4096
"""Retentions that can be let go before their time; older ones end by themselves."""


def given_hints(kv_hints: object, params: Mapping[str, Any] | None) -> object:
    """Return the envelope that came with a request: vLLM's own field, else of its parameters; None without one."""
    if kv_hints is not None or not params:
        return kv_hints
    return params.get("kv_hints", params.get("kv_hint"))


class HintFollower:
    """One rank's. Used by its worker's thread, and by that which publishes."""

    def __init__(
        self,
        node: Node,
        groups: Groups,
        parts: Sequence[Part],
        index: int,
        after_publishing: Callable[[Callable[[], None]], None],
        tally: Tally,
    ) -> None:
        """``parts``: the rank's, by group; ``index``: its number among the processes of its instance."""
        self._node = node
        self._groups = groups
        self._parts = parts
        self._suffix = f"-{index}" if index else ""
        self._after_publishing = after_publishing
        self._tally = tally
        # used by the publishing thread only: what was retained, when it ends by itself, and of which pages
        self._kept: list[tuple[float, Callable[[], int], frozenset[bytes]]] = []

    def follow(self, hinted: Hinted) -> None:
        """Begin what is asked for; waits for nothing. What needs pages of the request comes when they are published."""
        if hinted.hints.brings and (keys := self._keys(hinted.pages)):
            self._node.prefetch(keys)
            self._tally.count("hinted_blocks_prefetched", len(keys))
        if hinted.hints.retains or hinted.hints.shares or hinted.hints.lets_go:
            self._after_publishing(partial(self._follow_published, hinted.pages, hinted.hints))

    def _follow_published(self, pages: tuple[Pages, ...], hints: Hints) -> None:
        if hints.lets_go:
            self._let_go(frozenset(self._keys(pages)))
        for retain in hints.retains:
            self._retain(self._keys(pages, retain), retain.seconds)
        for target in hints.shares:
            if (keys := self._keys(pages)) and target + self._suffix != self._node.node_id:
                answer = self._node.hand_over(keys, target + self._suffix)
                self._tally.count("hinted_blocks_shared", answer.n_accepted)

    def _retain(self, keys: list[bytes], seconds: float) -> None:
        if not keys:
            return
        pin = self._node.pin(keys, seconds)
        if not (pin.outcomes == Outcome.HIT).all():
            # they were loaded from elsewhere, and are in this instance's blocks alone
            self._node.prefetch(keys, timeout=_BRING_S).wait(_BRING_S)
            again = self._node.pin(keys, seconds)
            pin.release()
            pin = again
        self._tally.count("hinted_blocks_retained", int(pin.outcomes.sum()))
        now = time.monotonic()
        kept = [each for each in self._kept if each[0] > now][-_MOST_KEPT + 1 :]
        self._kept = [*kept, (now + seconds, pin.release, frozenset(keys))]

    def _let_go(self, keys: frozenset[bytes]) -> None:
        kept = []
        for each in self._kept:
            if each[2].isdisjoint(keys):
                kept.append(each)
            else:
                each[1]()
        self._kept = kept

    def _keys(self, pages: Sequence[Pages], part: Retain | None = None) -> list[bytes]:
        """Return the keys of this rank's parts of blocks, of some of a request's tokens or of all, front first."""
        keys = []
        for of_group in pages:
            size = self._groups.each[of_group.group].block_size
            first = 0 if part is None else part.first // size
            last = None if part is None or part.last is None else -(-part.last // size)
            keys += [self._parts[of_group.group].key(name) for name in of_group.hashes[first:last]]
        return keys
