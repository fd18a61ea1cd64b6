"""Loading blocks into vLLM's KV caches: from the prefill instance that offers them, or from the page cache.

Every load ends by its deadline, and is then reported exactly once, with the blocks that are not proven right. Nothing
writes to a load's blocks any more when it is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.nodes import EngineNodes
from p2pkv.integrations.vllm_connector.by_layer import StepLoads
from p2pkv.integrations.vllm_connector.caches import KVCaches
from p2pkv.integrations.vllm_connector.handoff import Handoff, Rank, offers
from p2pkv.integrations.vllm_connector.load import Ask, Load
from p2pkv.integrations.vllm_connector.messages import Blocks, Fetch, Pull
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.integrations.vllm_connector.settings import Fingerprint, Instance
from p2pkv.integrations.vllm_connector.shares import Place
from p2pkv.integrations.vllm_connector.sources import has_equal_share, plan
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.integrations.vllm_connector.wants import Want, Wants
from p2pkv.limited_log import LimitedLog
from p2pkv.page import Outcome
from p2pkv.tracing import about

_log = logging.getLogger(__name__)

_CONNECTING, _FETCHING = 8, 4
"""Threads. A pull needs one only until its node is found and connected; a fetch until its pages are there."""
_AN_ERROR = "an error; the log says which"
_MAX_REPEATS, _PAUSE_S = 3, 0.3
"""A node that stood still is taken for dead and hung up on, and is back in a moment. One that is dead is not worth more
than a second."""


def _among(wanted: Blocks | None, offered: range) -> tuple[list[int], int]:
    """Return the ids of the blocks that are both wanted and offered, and the place of the first among the offered."""
    if wanted is None:
        return [], 0
    first = max(wanted.first, offered.start)
    last = min(wanted.first + len(wanted.ids), offered.stop)
    return wanted.ids[first - wanted.first : max(first, last) - wanted.first], first - offered.start


def _ended() -> Future[None]:
    ended: Future[None] = Future()
    ended.set_result(None)
    return ended


class Loads:
    """The loads of one rank. Started and taken by vLLM's worker thread, which waits for none of them."""

    def __init__(
        self,
        nodes: EngineNodes,
        caches: KVCaches,
        *,
        place: Place,
        instance: Instance,
        fingerprint: Fingerprint,
        boundary: Boundary,
        tally: Tally,
    ) -> None:
        """Start without loads."""
        self._nodes, self._caches, self._place, self._fingerprint = nodes, caches, place, fingerprint
        self._parts = [Part(place.rank, group, layout) for group, layout in enumerate(caches.layouts)]
        self._deadline, self._groups = instance.load_deadline, instance.groups.each
        self.boundary, self._tally = boundary, tally
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        self._connecting = ThreadPoolExecutor(_CONNECTING, thread_name_prefix="p2pkv-vllm-pull")
        self._fetching = ThreadPoolExecutor(_FETCHING, thread_name_prefix="p2pkv-vllm-fetch")
        self._loads: list[tuple[Load, Future[None]]] = []
        self._telling: list[tuple[Wants, float]] = []  # of loads that have ended, and until when
        self._step = StepLoads(caches.layers, self._settle)
        # where one row of an offer goes whose blocks nobody needs: taking it tells prefill so
        self._unwanted = np.zeros(caches.max_row_nbytes, np.uint8)
        self._unwanted_memory = nodes.member.register_memory(self._unwanted)

    def pull(self, pull: Pull) -> bool:
        """Start loading what prefill offers; or tell prefill that nobody will. Returns True."""
        load = self._load(pull)
        if pull.wait_s is None:
            return self._start(self._connecting, load, "pull", lambda: self._pull(load, pull))
        self._step.add(load)
        # here and on no other thread: once the step is over nobody may begin to write to the blocks
        self._attempt(load, "pull", lambda: self._pull(load, pull))
        self._leave_unwanted(load)
        return True

    def _leave_unwanted(self, load: Load) -> None:
        """Have prefill told what nobody needs, which may take longer than the step: a load of nothing."""
        told = [ask for ask in load.asks if not len(ask.owners)]
        if told:
            load.asks = [ask for ask in load.asks if len(ask.owners)]
            rest = replace(load, block_ids=set(), is_awaited=False, is_by_layer=False, asks=told, wants=None)
            self._loads.append((rest, _ended()))

    def wait_for_layer(self, layer: str) -> None:
        """Block until a layer is there of all loads that this step computes with, or they have failed."""
        self._step.wait(layer)

    def end_step(self) -> set[int]:
        """End the loads that the step has computed with; return the blocks that are not right. Idempotent."""
        return {block_id for load in self._step.end() for block_id in load.failed or ()}

    def fetch(self, fetch: Fetch) -> bool:
        """Start loading blocks from the page cache. Returns True."""
        load = self._load(fetch)
        return self._start(self._fetching, load, "fetch", lambda: self._fetch(load, fetch))

    def fail(self, asked: Pull | Fetch) -> None:
        """Take a load that could not be started: it has ended, and nothing came."""
        load = self._unstarted(asked, None)
        load.why, load.is_refused = _AN_ERROR, True
        if isinstance(asked, Pull) and asked.wait_s is not None:
            self._step.add(load)
            return
        self._loads.append((load, _ended()))

    def revoke(self, request_ids: Collection[str]) -> None:
        """Have loads end as soon as nothing writes to their blocks any more: nobody wants what they bring."""
        for load, _ in self._loads:
            if load.request_id in request_ids and load.is_awaited:
                load.is_revoked, load.why = True, "the request has ended"

    def forsake(self) -> None:
        """Have loads from the page cache that are under way fail when they end: the weights have changed."""
        for load, _ in self._loads:
            if not load.is_handoff:
                load.spoil("the weights have changed")

    def _load(self, asked: Pull | Fetch) -> Load:
        return self._unstarted(asked, self._caches.stream())

    def _unstarted(self, asked: Pull | Fetch, stream: int | None) -> Load:
        now = time.monotonic()
        is_handoff = isinstance(asked, Pull)
        of_groups = asked.blocks if isinstance(asked, Pull) else asked.pages
        block_ids = {
            block_id for each in of_groups for block_id in each.ids if self._caches.groups[each.group]
        }
        is_awaited = not isinstance(asked, Pull) or asked.is_awaited
        limit = asked.wait_s if isinstance(asked, Pull) else asked.timeout
        seconds = self._deadline if limit is None else min(self._deadline, limit)
        return Load(
            asked.request_id,
            block_ids,
            is_awaited,
            now,
            now + seconds,
            is_handoff,
            stream,
            is_by_layer=is_handoff and limit is not None,
        )

    def _start(self, pool: ThreadPoolExecutor, load: Load, operation: str, work: Callable[[], str]) -> bool:
        self._loads.append((load, self._submit(pool, load, operation, work)))
        return True

    def _submit(
        self, pool: ThreadPoolExecutor, load: Load, operation: str, work: Callable[[], str]
    ) -> Future[None]:
        started: Future[None] = Future()

        def guarded() -> None:
            if started.set_running_or_notify_cancel():
                self._attempt(load, operation, work)
                started.set_result(None)

        try:
            pool.submit(guarded)
        except RuntimeError:
            # the pool queues what it then has no thread for; a load that is reported must not begin later
            if started.cancel():
                raise
        return started

    def _attempt(self, load: Load, operation: str, work: Callable[[], str]) -> None:
        """Do what begins a load; after an error it is refused."""
        load.why, load.is_refused = _AN_ERROR, True

        def attempt() -> None:
            with about(load.request_id):
                load.why = work()
            load.is_refused = bool(load.why)

        self.boundary.call(operation, attempt, miss=None)

    def _pull(self, load: Load, pull: Pull) -> str:
        """Ask prefill for the blocks; return what speaks against it."""
        handoff = pull.handoff
        if handoff is None or (pull.refusal and pull.is_awaited):
            return pull.refusal
        difference = self._fingerprint.difference(handoff.fingerprint)
        if difference is not None:
            return f"prefill's blocks are of another kind: {difference}"
        try:
            load.asks, wants = self._asks(handoff, pull.blocks)
        except UsageError as error:
            return f"prefill's blocks can't be taken: {error}"
        sources = {ask.rank for ask in load.asks} | {rank for rank, _ in wants}
        # who is loaded from by layer was there a moment ago
        until = time.monotonic() if load.is_by_layer else load.deadline
        for rank in sources:
            if not self._is_there(rank, until):
                return f"prefill's node {rank.node_id} is not there any more"
        if wants:
            load.wants = Wants(self._nodes.member, handoff.name, wants)
            load.wants.put(max(0.001, load.deadline - time.monotonic()))
        for ask in load.asks:
            self._get(load, ask)
        return ""

    def _asks(
        self, handoff: Handoff, wanted: tuple[Blocks, ...]
    ) -> tuple[list[Ask], tuple[tuple[Rank, Want], ...]]:
        """Return what to ask for, and what prefill is to be told before. Raises UsageError if it can't be had."""
        place = self._place
        if not has_equal_share(handoff, place):
            asked = plan(handoff, place, wanted, self._groups, self._caches)
            asks = [Ask(part.source, part.name, part.rows, 0, part.owners) for part in asked.parts]
            return asks, asked.wants
        rank = handoff.ranks[place.rank]
        if rank.layout != self._caches.layout:
            raise UsageError(f"layout is {rank.layout!r} there and {self._caches.layout!r} here")
        return list(self._whole(handoff, rank, wanted)), ()

    def _whole(self, handoff: Handoff, rank: Rank, all_wanted: tuple[Blocks, ...]) -> Iterator[Ask]:
        """Yield what is wanted of every whole offer; of those of which nothing is, a row that tells prefill so."""
        wanted = {blocks.group: blocks for blocks in all_wanted}
        for number, (group, caches) in enumerate(zip(self._groups, self._caches.groups, strict=True)):
            if caches is None:
                continue
            offered = group.needed(handoff.n_tokens)
            block_ids, first_block = _among(wanted.get(number), offered)
            for part in offers(handoff.name, number, len(offered), caches.row_nbytes):
                owners = np.repeat(np.asarray(block_ids, np.int64), len(part.rows))
                rows, first_row = caches.rows(block_ids, part.rows), first_block * len(part.rows)
                if not block_ids:
                    nbytes = caches.row_nbytes[part.rows.start]
                    rows = np.array([[self._unwanted_memory.address, nbytes]], np.int64)
                    first_row = 0
                yield Ask(rank, part.name, rows, first_row, owners, caches.layers_of(part.rows))

    def _ask_again(self, load: Load) -> str:
        """Ask once more for what was lost with the way to its node, if the node itself is there."""
        self._closing.wait(_PAUSE_S)
        for ask in load.asks:
            if ask.is_lost:
                if not self._is_there(ask.rank, load.deadline):
                    load.n_repeats = _MAX_REPEATS
                    return f"prefill's node {ask.rank.node_id} is lost"
                self._get(load, ask)
        if load.wants is not None:
            load.wants.put(max(0.001, load.deadline - time.monotonic()))
        return ""

    def _is_there(self, rank: Rank, until: float) -> bool:
        left = max(0.001, until - time.monotonic())
        return self._nodes.member.transfers.meet(rank.node_id, rank.boot_epoch, timeout=left)

    def _get(self, load: Load, ask: Ask) -> None:
        left = max(0.001, load.deadline - time.monotonic())
        ask.keep()
        ask.grant = self._nodes.member.transfers.get_async(
            ask.rank.node_id, ask.name, ask.rows, first_row=ask.first_row, timeout=left, stream=load.stream
        )

    def _fetch(self, load: Load, fetch: Fetch) -> str:
        is_whole = True
        for pages in fetch.pages:
            caches = self._caches.groups[pages.group]
            if caches is None:
                continue
            keys = [self._parts[pages.group].key(block_hash) for block_hash in pages.hashes]
            left = max(0.001, load.deadline - time.monotonic())
            found = self._nodes.cache.fetch(keys, caches.pieces(pages.ids), timeout=left, stream=load.stream)
            load.proven.update(np.asarray(pages.ids)[found == Outcome.HIT].tolist())
            is_whole = is_whole and bool(found.all())
        return "" if is_whole else "pages were evicted, or their owners are gone"

    def take_done(self) -> dict[str, set[int] | None]:
        """Return the requests whose loads have ended since the last time.

        With each the blocks that are not right, or None if the load is right.
        """
        done: dict[str, set[int] | None] = {}
        running = []
        for load, started in self._loads:
            awaited = self._awaited_by(load, started)
            if awaited is not None:
                running.append((load, awaited))
                continue
            self._settle(load)
            if load.is_awaited:
                done[load.request_id] = load.failed
        self._loads = running
        self._forget_told()
        return done

    @guarded("settle", miss=None)
    def _forget_told(self) -> None:
        """Prefill may still be hearing of a load that has ended here."""
        now = time.monotonic()
        is_over = [wants.is_done or now >= deadline for wants, deadline in self._telling]
        over = [wants for (wants, _), is_over_now in zip(self._telling, is_over, strict=True) if is_over_now]
        self._telling = [
            each for each, is_over_now in zip(self._telling, is_over, strict=True) if not is_over_now
        ]
        for wants in over:
            self._connecting.submit(wants.close)

    @guarded("settle", miss=None)
    def _awaited_by(self, load: Load, started: Future[None]) -> Future[None] | None:
        """Return what a load still waits for, which may be another try; None if it has ended.

        An error here is no reason to have a request wait for good.
        """
        if not started.done():
            return started
        if load.is_revoked:
            return None  # what settles it revokes its grants
        if load.is_refused_by_prefill:
            load.why = "gone"
            return None
        if not load.is_stuck:
            return started
        if not self._is_worth_repeating(load):
            return None
        load.n_repeats += 1
        return self._submit(self._connecting, load, "pull", lambda: self._ask_again(load))

    def _is_worth_repeating(self, load: Load) -> bool:
        has_time = load.n_repeats < _MAX_REPEATS and time.monotonic() + 2 * _PAUSE_S < load.deadline
        return has_time and (load.is_unheard or any(ask.is_lost for ask in load.asks))

    @guarded("settle", miss=None)
    def _settle(self, load: Load) -> None:
        load.settle()
        if load.wants is not None:
            self._telling.append((load.wants, load.deadline))
        if load.is_awaited:
            self._count(load, time.monotonic() - load.began)

    def _count(self, load: Load, seconds: float) -> None:
        n_failed = len(load.failed or ())
        n_loaded = len(load.block_ids) - n_failed
        if not load.is_handoff:
            self._tally.count("prefix_blocks_loaded", n_loaded)
            self._tally.count("prefix_blocks_missed", n_failed)
            return
        self._tally.count("handoff_blocks", n_loaded)
        self._tally.count("handoff_bytes", load.nbytes)
        if load.failed is None:
            self._tally.count("handoffs_loaded")
            self._tally.count("handoffs_loaded_by_layer", int(load.is_by_layer))
            self._tally.took(seconds)
            return
        self._tally.count("handoffs_failed")
        self._log.warning(
            load.why,
            "hand-off to request %s failed after %.2f s, %d of its %d blocks are missing: %s",
            load.request_id,
            seconds,
            n_failed,
            len(load.block_ids),
            load.why,
        )

    def close(self) -> None:
        """End the threads; close the nodes before, so that nothing is waited for. Idempotent."""
        self._closing.set()
        for pool in (self._connecting, self._fetching):
            pool.shutdown(cancel_futures=True)
