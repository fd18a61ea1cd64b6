"""The connector's half in a vLLM worker: its nodes, its KV caches, and what moves between them and the cluster.

It does what the scheduler's half has decided, on threads of its own and native ones; vLLM's thread starts things and
asks what is done. A block that somebody may still read stays its request's until that is over, and what is loaded
counts only when it is proven right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from p2pkv.config import Config
from p2pkv.instances.announcing import announce
from p2pkv.instances.heartbeat import Heart
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.nodes import EngineNodes
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.hints import HintFollower
from p2pkv.integrations.vllm_connector.leaving import Leaving
from p2pkv.integrations.vllm_connector.loads import Loads
from p2pkv.integrations.vllm_connector.messages import (
    Fetch,
    Hinted,
    Publish,
    Pull,
    RankDescription,
    StepMetadata,
    StepReport,
)
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.publishing import Publishing
from p2pkv.integrations.vllm_connector.residents import Residents
from p2pkv.integrations.vllm_connector.settings import Fingerprint, Instance
from p2pkv.integrations.vllm_connector.shares import Place, Share, share_of
from p2pkv.integrations.vllm_connector.stats import Stats, Tally
from p2pkv.node import Node

_NOBODY: set[str] = set()


class WorkerSide:
    """One rank. Used by vLLM's worker thread alone, and closed by it."""

    def __init__(
        self,
        instance: Instance,
        rank: int,
        isa: str,
        caches: KVCaches,
        *,
        start_node: Callable[[Config], Node] = Node.start,
    ) -> None:
        """Start its nodes and register the KV caches with them; the errors of both are raised: vLLM does not start."""
        self._caches = caches
        self._fingerprint = Fingerprint({**instance.handed_over, "isa": isa})
        identity = Fingerprint({**instance.identity, "isa": isa})
        self._namespace = identity.namespace(instance.config.namespace)
        config = instance.worker_config(rank, self._namespace)
        has_pages = instance.reads_prefixes or instance.writes_prefixes
        self.nodes = EngineNodes.start(config, start_node, has_pages=has_pages)
        self.boundary = Boundary("vLLM's worker", self.nodes.cache.metrics)
        self._tally = Tally()
        for memory in self._caches.ranges:
            self.nodes.register_address(
                memory.address, memory.nbytes, memory.owner, is_offered=instance.is_producer
            )
        self._place = Place(rank, instance.split, _shares(caches, instance, isa))
        self._loads = Loads(
            self.nodes,
            self._caches,
            place=self._place,
            instance=instance,
            fingerprint=self._fingerprint,
            boundary=self.boundary,
            tally=self._tally,
        )
        parts = [Part(rank, group, layout) for group, layout in enumerate(caches.layouts)]
        self._residents = Residents(rank, self._namespace) if instance.tells_events else None
        if self._residents is not None:
            self.nodes.cache.follow_kv_events(self._residents.hear)
        cache = self.nodes.cache
        self._publishing = Publishing(
            cache, caches, parts, self.boundary, self._tally, residents=self._residents
        )
        self._hints = HintFollower(
            cache, instance.groups, parts, instance.first_index + rank, self._publishing.then, self._tally
        )
        self._fails_by_block = instance.groups.is_plain
        self._leaving = Leaving(self.nodes.member, caches, self._place, instance, self.boundary, self._tally)
        self._failed: set[int] = set()
        self._last: dict[str, StepMetadata] = {}  # by part, the step of which it was done last
        self._heart = self._announce(instance) if rank == 0 else None

    def _announce(self, instance: Instance) -> Heart | None:
        """Tell routers of the instance. Here and not in the scheduler, which vLLM may kill before it says a word."""
        if instance.announced is None:
            return None
        known = {"node_id": self.nodes.cache.owner_id, "namespace": self._namespace}
        told = msgspec.structs.replace(instance.announced, **known)
        return announce(instance.config, told, self.nodes.member.routers)

    def describe(self) -> RankDescription:
        """Return what the scheduler's half needs to know."""
        member = self.nodes.member
        own = next(m for m in member.members() if m.node_id == member.node_id)
        return RankDescription(
            own.node_id,
            own.boot_epoch,
            self._fingerprint.fields,
            self._place.shares,
            self._caches.layouts,
            self._namespace,
        )

    def before_forward(self, metadata: StepMetadata) -> None:
        """Offer the blocks of finished requests: decode may be asking already."""
        if self._is_done("prepare", metadata):
            return
        if metadata.is_cleared:
            self._loads.forsake()
            self._clear()
        if metadata.revoked:
            self._loads.revoke(metadata.revoked)
        for hinted in metadata.hints:
            self._follow(hinted)
        for leave in metadata.leaves:
            self._leaving.add(leave)

    @guarded("clear", miss=None)
    def _clear(self) -> None:
        self.nodes.take_back()

    @guarded("hint", miss=None)
    def _follow(self, hinted: Hinted) -> None:
        self._hints.follow(hinted)

    def load(self, metadata: StepMetadata) -> None:
        """Start the step's loads. Not before vLLM has cleared the blocks it gives out in this step.

        vLLM says so once or, as its layers are computed, again and again.
        """
        if self._is_done("load", metadata):
            return
        for pull in metadata.pulls:
            self._start(pull, partial(self._loads.pull, pull))
        for fetch in metadata.fetches:
            self._start(fetch, partial(self._loads.fetch, fetch))

    def wait_for_layer(self, layer: str) -> None:
        """Block until a layer is there of all that this step computes with, or its load has failed."""
        self._loads.wait_for_layer(layer)

    def _start(self, load: Pull | Fetch, start: Callable[[], bool]) -> None:
        """Start a load; one that can't be has failed, and vLLM hears of it as of others."""
        if not self.boundary.call("load", start, miss=False):
            self._loads.fail(load)

    def after_forward(self, metadata: StepMetadata) -> None:
        """Publish what the step has computed."""
        if self._is_done("publish", metadata):
            return
        self._end_step()
        for publish in metadata.publishes:
            if not self._publish(publish):
                self._publishing.skip(publish)

    @guarded("publish", miss=False)
    def _publish(self, publish: Publish) -> bool:
        self._publishing.add(publish, self._caches.stream())
        return True

    def _is_done(self, part: str, metadata: StepMetadata) -> bool:
        """Say whether this part of a step has been done, and take it for done from here on."""
        before = self._last.get(part)
        self._last[part] = metadata
        return before is metadata

    def take_done(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests whose blocks vLLM may free, those whose loads have ended, and of these the failed.

        Each once. A load of a model whose blocks tell by themselves what is missing has not failed: see
        :meth:`take_failed_blocks`.
        """
        self._end_step()
        return self._take_released(), *self._take_loaded()

    def report(self) -> StepReport | None:
        """Return what the scheduler's half has to hear."""
        done = self._publishing.take_done()
        changes = [] if self._residents is None else self._residents.take()
        return StepReport(done, changes) if done or changes else None

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that are not right, of the loads that ended since the last time."""
        failed, self._failed = self._failed, set()
        return failed

    @guarded("release", miss=_NOBODY)
    def _take_released(self) -> set[str]:
        return self._leaving.take_released()

    @guarded("settle", miss=(_NOBODY, _NOBODY))
    def _take_loaded(self) -> tuple[set[str], set[str]]:
        missing = self._loads.take_done()
        if not self._fails_by_block:
            return set(missing), {request_id for request_id, blocks in missing.items() if blocks is not None}
        for blocks in missing.values():
            self._failed |= blocks or set()
        return set(missing), set()

    def _end_step(self) -> None:
        """End what the step has computed with: it is over, or vLLM asks what has become of it."""
        self._failed |= self._loads.end_step()

    def stats(self) -> Stats | None:
        """Return what was counted since the last time."""
        return self._tally.take()

    def close(self) -> None:
        """Leave the routers and the cluster: loads under way fail, offers end. Idempotent; takes seconds at most."""
        if self._heart is not None:
            self._heart.close()
        self.nodes.close()
        self._leaving.close()
        self._publishing.close()
        self._loads.close()


def _shares(caches: KVCaches, instance: Instance, isa: str) -> tuple[Share, ...]:
    """Describe what a rank holds of each group of layers; of some it may hold none."""
    return tuple(
        Share() if held is None else share_of(held.tiles, held.layers, group, instance.split, isa)
        for held, group in zip(caches.groups, instance.groups.each, strict=True)
    )
