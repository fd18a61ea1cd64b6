"""Hand-offs that are loaded by layer: within the step that computes with them, one layer while the one before computes.

It saves a request the rounds of a load in the background, and costs the others of its step what they wait for its
bytes. So it is for prefill instances that are known to be near: those of which the last load has come whole. The first
hand-off of an instance, and the next one after a failure, is loaded in the background, where nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from p2pkv.integrations.vllm_connector.handoff import Handoff
from p2pkv.integrations.vllm_connector.load import Load

_MAX_NEAR = 4096
"""Instances; a hand-off comes from outside and may name any."""

_Key = tuple[str, int]


class NearInstances:
    """The scheduler's half: says which hand-offs are loaded so. Used by the scheduler's thread alone."""

    def __init__(self, wait_s: float | None) -> None:
        """Know of nobody. ``wait_s``: how long a step may wait for a load; None: nothing is loaded by layer."""
        self._wait_s = wait_s
        self._near: dict[_Key, None] = {}
        self._loading: dict[str, tuple[_Key, frozenset[int]]] = {}

    def wait_s(self, handoff: Handoff | None) -> float | None:
        """Return how long a step may wait for this hand-off; None: it is to be loaded in the background."""
        return self._wait_s if handoff is not None and _key(handoff) in self._near else None

    def began(self, request_id: str, handoff: Handoff | None, block_ids: Collection[int]) -> None:
        """Take note of a load."""
        if self._wait_s is not None and handoff is not None:
            self._loading[request_id] = (_key(handoff), frozenset(block_ids))

    def heard(self, loaded: Collection[str], failed_blocks: Collection[int]) -> None:
        """Take note of what a step has brought: loads of the background that have ended, and blocks that failed."""
        for request_id, (key, block_ids) in list(self._loading.items()):
            if not block_ids.isdisjoint(failed_blocks):
                self._near.pop(key, None)
            elif request_id in loaded:
                if len(self._near) >= _MAX_NEAR:
                    self._near.clear()
                self._near[key] = None
            else:
                continue
            del self._loading[request_id]

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._loading.pop(request_id, None)


def _key(handoff: Handoff) -> _Key:
    return handoff.ranks[0].node_id, handoff.ranks[0].boot_epoch


class StepLoads:
    """A worker's half: the loads of the step under way. Used by vLLM's worker thread alone.

    A load is right only if all layers were waited for and each was there by then. It is settled by the end of its step:
    nothing writes to its blocks from then on.
    """

    def __init__(self, layers: Collection[str], settle: Callable[[Load], None]) -> None:
        """``layers``: all that have a cache here. ``settle`` ends a load, once."""
        self._layers, self._settle = frozenset(layers), settle
        self._running: list[Load] = []
        self._ended: list[Load] = []
        self._waited: set[str] = set()

    def add(self, load: Load) -> None:
        """Have a load belong to the step, which waits for all of its loads together no longer than for the first."""
        load.deadline = min([load.deadline, *(other.deadline for other in self._running + self._ended)])
        self._running.append(load)

    def wait(self, layer: str) -> None:
        """Block until a layer is there of all loads; one of which it isn't by its deadline has failed."""
        if not self._running:
            return
        known = layer if layer in self._layers else None  # else it looks at some other layer's cache
        for load in list(self._running):
            if not load.waits_for(known):
                self._end(load)
        self._waited.add(layer)

    def end(self) -> list[Load]:
        """End the step's loads, and return them."""
        for load in list(self._running):
            if missed := self._layers - self._waited:
                load.spoil(f"{len(missed)} layers were not waited for, {min(missed)} is one")
            self._end(load)
        ended, self._ended, self._waited = self._ended, [], set()
        return ended

    def _end(self, load: Load) -> None:
        self._running.remove(load)
        self._ended.append(load)
        self._settle(load)
