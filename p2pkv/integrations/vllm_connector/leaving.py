"""Finished requests whose blocks prefill keeps, and offers: whole, until decode ranks say that they take parts.

Whole blocks cost one offer, made at once; a decode rank with an equal share takes it, and nobody here has to do
anything. A rank that shares the model otherwise puts what it wants into the request's inbox (``wants.py``). Then the
whole offers are withdrawn, and every decode rank is offered its part: the blocks are free again when all ranks that
take from this one have said what they want, and have it, or when the lease ends. Before that if there is a buddy pool:
what has not been taken for a while is stowed there (``stowing.py``), and the hand-off goes on without vLLM's blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.vllm_connector.caches import GroupCaches, KVCaches
from p2pkv.integrations.vllm_connector.handoff import offers
from p2pkv.integrations.vllm_connector.messages import Blocks, Leave
from p2pkv.integrations.vllm_connector.settings import Instance
from p2pkv.integrations.vllm_connector.shares import Pair, Place, Split, names, takers
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.integrations.vllm_connector.stowing import Copies
from p2pkv.integrations.vllm_connector.tiles import Granules, Tiles
from p2pkv.integrations.vllm_connector.wants import (
    MAX_RANKS,
    PLACES,
    REFUSAL_NBYTES,
    WANT_NBYTES,
    Want,
    WantedGroup,
    end_of,
    inbox,
    part_of,
    refusal_of,
)
from p2pkv.limited_log import LimitedLog
from p2pkv.node import Node
from p2pkv.tracing import about
from p2pkv.transfers import Grant, HeadMap, Offer, RowStatus

_log = logging.getLogger(__name__)

_INBOXES = 256
"""Open at a time, of 64 KiB each; those of later requests are opened as earlier ones are taken or end."""
_LOOK_S, _LOOK_AT_EACH_S = 0.002, 1e-4
"""Between two looks into the inboxes, and for each of them: looking takes some microseconds each."""
_STOW_S = 0.005
"""How long one request's blocks may be copied between two looks."""


@dataclass(slots=True, eq=False)
class _Left:
    """A finished request whose blocks are kept."""

    leave: Leave
    until: float
    """The end of the lease."""
    stow_at: float
    """When what has not been taken is copied, or tried to be copied once more."""
    stream: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards what follows, but for the last two, which are the looking thread's."""
    is_offered: bool = False
    """Whole, which may be nothing at all: a chunk that ends with the prompt leaves nothing to look back at."""
    is_over: bool = False
    offers: dict[str, Offer] = field(default_factory=dict)
    """By name."""
    rows: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Of the whole blocks, by the name of their offer, as long as they are not stowed."""
    copies: Copies = field(default_factory=Copies)
    is_stowed: bool = False
    """Whether vLLM may have the blocks, though somebody may still take the hand-off."""
    is_released: bool = False
    """Whether it has them, and the looking thread sees to the end."""
    tp_size: int = 0
    """Of who takes parts; 0 while nobody does."""
    due: set[tuple[int, int, str]] = field(default_factory=set)
    """What has not been asked for: tensor parallel rank, group and layer."""
    slot: int | None = None
    wants: Grant | None = None

    def is_taken(self) -> bool:
        """Whether nobody here or there needs the blocks any more."""
        is_awaited = bool(self.due) and time.monotonic() < self.until
        return not is_awaited and all(offer.done() for offer in self.offers.values())


class Leaving:
    """All of one rank's. Its worker's thread adds and takes, one of its own looks for wants; closed by its owner."""

    def __init__(
        self, node: Node, caches: KVCaches, place: Place, instance: Instance, boundary: Boundary, tally: Tally
    ) -> None:
        """Start without requests."""
        self._node, self._caches, self._place = node, caches, place
        self._lease, self._stow_after = instance.config.transfer_lease, instance.stow_after
        self.boundary, self._tally = boundary, tally
        self._log = LimitedLog(_log)
        self._changed = threading.Condition()  # guards the next two
        self._left: list[_Left] = []
        self._is_closed = False
        # the looking thread's alone
        self._rows = np.zeros((_INBOXES, PLACES * MAX_RANKS, WANT_NBYTES), np.uint8)
        self._memory = node.register_memory(self._rows)
        self._refusal = np.zeros(REFUSAL_NBYTES, np.uint8)
        self._refusal_memory = node.register_memory(self._refusal, readable=True)
        self._slots = list(range(_INBOXES))
        self._seen: list[_Left] = []
        self._thread = threading.Thread(target=self._run, name="p2pkv-vllm-wants", daemon=True)
        self._thread.start()

    def add(self, leave: Leave) -> None:
        """Keep a request's blocks, and offer them whole; what the worker has queued by now is waited for."""
        now = time.monotonic()
        left = _Left(leave, now + self._lease, now + self._stow_after)
        with left.lock:
            with self._changed:
                self._left.append(left)
                self._changed.notify_all()
            with about(leave.request_id):
                self._offer(left)

    @guarded("offer", miss=None)
    def _offer(self, left: _Left) -> None:
        left.stream = self._caches.stream()
        for blocks in left.leave.blocks:
            caches = self._caches.groups[blocks.group]
            if caches is None:
                continue
            for part in offers(left.leave.name, blocks.group, len(blocks.ids), caches.row_nbytes):
                rows = caches.rows(blocks.ids, part.rows)
                left.offers[part.name] = self._node.transfers.offer(part.name, rows, stream=left.stream)
                left.rows[part.name] = rows
        left.is_offered = True
        self._tally.count("handoffs_offered")

    def take_released(self) -> set[str]:
        """Return the requests whose blocks vLLM may have back, each once."""
        released: list[_Left] = []
        with self._changed:
            for left in self._left:
                # one that is being offered in parts, or copied, at this moment is not over
                if not left.is_released and left.lock.acquire(blocking=False):
                    try:
                        left.is_over = left.is_taken()
                        left.is_released = left.is_over or left.is_stowed
                    finally:
                        left.lock.release()
                    if left.is_released:
                        released.append(left)
            self._left = [left for left in self._left if not left.is_over]
        for left in released:
            if left.is_over:
                self._end(left)
        return {left.leave.request_id for left in released}

    def _end(self, left: _Left) -> None:
        left.copies = Copies()
        self._count(left)
        self._take_back(end_of(left.leave.name))

    def _count(self, left: _Left) -> None:
        is_whole = left.is_offered and not left.due
        is_taken = all((offer.statuses() != RowStatus.TIMED_OUT).all() for offer in left.offers.values())
        self._tally.count("handoffs_taken" if is_taken and is_whole else "handoffs_expired")

    @guarded("offer", miss=None)
    def _take_back(self, name: str) -> None:
        """Have whoever asks for a row of this name, now or later, hear that it is gone."""
        row = np.array([[self._refusal.ctypes.data, REFUSAL_NBYTES]], np.int64)
        self._node.transfers.offer(name, row).withdraw()

    def close(self) -> None:
        """End the thread; close the node before. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- the looking thread

    def _run(self) -> None:
        while (kept := self._next()) is not None:
            for left in self._seen:
                if left.is_over:
                    self._close_inbox(left)
            self._seen = [left for left in kept if not left.is_over]
            for left in self._seen:
                with about(left.leave.request_id):
                    self._look(left)
                    self._stow(left)
                    self._end_released(left)

    def _next(self) -> list[_Left] | None:
        """Wait for the time of the next look; return what is to be looked at, or None at the end."""
        with self._changed:
            if self._seen:
                self._changed.wait(_LOOK_S + _LOOK_AT_EACH_S * len(self._seen))
            else:
                self._changed.wait_for(lambda: self._left or self._is_closed)
            return None if self._is_closed else list(self._left)

    @guarded("stow", miss=None)
    def _stow(self, left: _Left) -> None:
        """Copy some of what nobody has taken; once all of it is copied vLLM may have the blocks."""
        if time.monotonic() < left.stow_at:
            return
        with left.lock:
            if left.is_over or left.is_stowed or not left.is_offered:
                return
            until = time.monotonic() + _STOW_S
            left.stow_at = time.monotonic() + self._stow_after  # after an error, or if there is no room
            while left.rows:
                if not self._stow_whole(left, next(iter(left.rows))):
                    return
                if time.monotonic() > until:
                    left.stow_at = 0.0
                    return
            # none of them, or parts that were offered before the blocks were copied
            if all(offer.stow() is not None or offer.done() for offer in left.offers.values()):
                left.is_stowed = True
                self._tally.count("handoffs_stowed")

    def _stow_whole(self, left: _Left, name: str) -> bool:
        """Copy what is, or was, offered under a name; say whether nothing of it is needed where it lies."""
        rows, offer = left.rows[name], left.offers.get(name)
        if offer is None:
            # parts are offered instead, and more may be wanted: a copy that has no other name than this
            own = self._node.transfers.offer(f"{name}/copy", rows, stream=left.stream)
            copy = own.stow()
            own.withdraw()
        else:
            copy = offer.stow()
        if copy is None and (offer is None or not offer.done()):
            return False
        if copy is not None:
            left.copies.add(rows, copy)
        del left.rows[name]
        return True

    @guarded("release", miss=None)
    def _end_released(self, left: _Left) -> None:
        """See to the end of a hand-off whose blocks vLLM has had back before: it may take no steps by then."""
        with left.lock:
            if not left.is_released or left.is_over or not left.is_taken():
                return
            left.is_over = True
        with self._changed:
            self._left = [each for each in self._left if each is not left]
        self._end(left)

    @guarded("want", miss=None)
    def _close_inbox(self, left: _Left) -> None:
        if left.slot is not None and left.wants is not None:
            left.wants.revoke()
            self._slots.append(left.slot)
            left.slot = left.wants = None

    @guarded("want", miss=None)
    def _look(self, left: _Left) -> None:
        if left.wants is None:
            if not self._slots:
                return
            left.slot = self._slots.pop()
            rows = self._rows[left.slot]
            rows[:] = 0
            first = rows.ctypes.data
            spans = [[first + number * WANT_NBYTES, WANT_NBYTES] for number in range(len(rows))]
            left.wants = self._node.transfers.grant(
                inbox(left.leave.name), np.array(spans, np.int64), timeout=self._lease
            )
        assert left.slot is not None
        for number in np.flatnonzero(left.wants.statuses() == RowStatus.OK).tolist():
            row = self._rows[left.slot, number]
            if row.any():
                self._hear(left, number % MAX_RANKS, row)
                row[:] = 0  # it has been read

    def _hear(self, left: _Left, rank: int, row: NDArray[np.uint8]) -> None:
        want = None
        try:
            want = Want.from_row(row)
            self._serve(left, rank, want)
        except UsageError as error:
            self._log.warning(str(error), "a decode rank gets nothing of a hand-off: %s", error)
            if want is not None:
                self._take_back(refusal_of(left.leave.name, want))

    def _serve(self, left: _Left, rank: int, want: Want) -> None:
        """Offer a decode rank its part. Raises UsageError for what it can't have."""
        if want.rank != rank:
            raise UsageError(f"rank {rank} says that it is rank {want.rank}")
        if len(want.groups) != len(self._place.shares):
            raise UsageError(
                f"it has {len(want.groups)} groups of layers, and there are {len(self._place.shares)}"
            )
        heads = self._place.split.map_to(Split(want.tp_size, self._place.split.n_heads))
        if want.tp_rank not in takers(heads, self._place.tp_rank):
            raise UsageError(f"rank {want.tp_rank} of {want.tp_size} takes nothing from this one")
        with left.lock:
            if left.is_over:
                return
            self._begin_parts(left, heads)
            for number, wanted in enumerate(want.groups):
                self._offer_part(left, want, number, wanted, heads)
                asked = {(want.tp_rank, number, layer) for layer in names(wanted.share.layers)}
                left.due -= asked

    def _begin_parts(self, left: _Left, heads: HeadMap) -> None:
        """Take the whole offers back, when the first one wants a part."""
        if left.tp_size:
            if left.tp_size != heads.to_tp:
                raise UsageError(
                    f"a decode instance of {left.tp_size} ranks takes this hand-off, not {heads.to_tp}"
                )
            return
        if any((offer.statuses() == RowStatus.OK).any() for offer in left.offers.values()):
            raise UsageError("somebody else has taken this hand-off")
        for offer in left.offers.values():
            offer.withdraw()
        left.tp_size, left.offers = heads.to_tp, {}
        left.due = {
            (tp_rank, number, layer)
            for tp_rank in takers(heads, self._place.tp_rank)
            for number, share in enumerate(self._place.shares)
            for layer in names(share.layers)
        }

    def _offer_part(self, left: _Left, want: Want, number: int, wanted: WantedGroup, heads: HeadMap) -> None:
        caches, share = self._caches.groups[number], self._place.shares[number]
        pair = Pair.of(heads, self._place.tp_rank, want.tp_rank, share, wanted.share)
        if caches is None or not pair.layers or not wanted.n:
            return
        if reason := wanted.share.difference(share):
            raise UsageError(reason)
        granules = Granules(pair.granule, wanted.first, wanted.n)
        rows = _rows(caches, pair, granules, _of_group(left.leave.blocks, number))
        if left.is_stowed:
            rows = left.copies.of(rows)
        until = max(0.001, left.until - time.monotonic())
        name = part_of(left.leave.name, want, number)
        # who has an equal rank asks for the same
        if name not in left.offers or left.offers[name].done():
            rows = np.ascontiguousarray(rows)
            left.offers[name] = self._node.transfers.offer(name, rows, lease=until, stream=left.stream)


def _rows(caches: GroupCaches, pair: Pair, granules: Granules, blocks: Blocks | None) -> NDArray[np.int64]:
    """Return where the wanted granules lie."""
    assert isinstance(caches.tiles, Tiles), "else its blocks can be handed over whole only"
    if blocks is None:
        raise UsageError("nothing of that group of layers is handed off")
    try:
        owners = caches.tiles.owners(granules, blocks.first, blocks.ids)
    except IndexError as error:
        raise UsageError(f"it wants {error}") from error
    layers = caches.numbers(pair.layers)
    return caches.tiles.rows(layers, pair.from_heads, granules, owners, is_by_head=pair.is_by_head)


def _of_group(blocks: Sequence[Blocks], group: int) -> Blocks | None:
    return next((each for each in blocks if each.group == group), None)
