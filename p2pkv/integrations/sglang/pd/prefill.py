"""Prefill's side of SGLang's transfers: it learns what decode wants, and offers the KV as it is computed.

Threads, all started and joined by :class:`PrefillSide`: one takes decode's messages, ``PUTTERS`` offer pages, one tells
decode of failures. So SGLang's scheduler never waits for another server.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.sglang.pd import stages
from p2pkv.integrations.sglang.pd.common import CommonManager, CommonSender, Poll
from p2pkv.integrations.sglang.pd.heads import HeadRows, Split, difference
from p2pkv.integrations.sglang.pd.rooms import Outgoing, Progress, Putting, Target
from p2pkv.integrations.sglang.pd.rows import Items, RequestRows, Spans, state_items
from p2pkv.integrations.sglang.pd.threads import Mailbox, Worker
from p2pkv.integrations.sglang.pd.wire import Wanted, unpack, unpack_abort
from p2pkv.limited_log import LimitedLog
from p2pkv.tracing import about

_log = logging.getLogger(__name__)

PUTTERS = 4
"""Threads that offer; decode nodes are spread over them, so that one being connected to holds up a quarter at most."""
_MAX_REMEMBERED = 4096
"""Requests remembered that one side gave up before the other had them; later ones push out earlier ones."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of a request, in the order of the request; the last one brings the rest of it."""

    pages: Items
    first_page: int
    is_last: bool
    slot: int | None
    states: Sequence[object] | None
    ready: tuple[object, ...]
    """CUDA events to wait for before the pages are read."""


class PrefillSide:
    """What a prefill rank's manager does for all its requests. Thread-safe."""

    def __init__(
        self,
        manager: CommonManager,
        rows: RequestRows,
        boundary: Boundary,
        transfers: Putting,
        split: Split | None = None,
        place: stages.Place | None = None,
    ) -> None:
        """``split`` says which heads this rank has; without it every rank of decode has to be like this one.

        ``place`` says which pipeline stage it is.
        """
        self._manager = manager
        self._rows = rows
        self._shape = rows.shape
        self._split = Split() if split is None else split
        self._stage = stages.Place() if place is None else place
        self._boundary = boundary
        self._log = LimitedLog(_log)
        self._transfers = transfers
        self._lock = threading.Lock()  # guards what follows
        self._outgoing: dict[int, Outgoing] = {}
        self._open: set[int] = set()
        self._given_up_there: OrderedDict[int, str] = OrderedDict()
        self._given_up_here: OrderedDict[int, str] = OrderedDict()
        self._workers = [Worker(f"p2pkv-pd-put-{i}", boundary) for i in range(PUTTERS)]
        self._notifier = Worker("p2pkv-pd-notify", boundary)
        self._mailbox = Mailbox(manager.server_socket, self._take, boundary)

    # --- what decode says, on the mailbox's thread

    def _take(self, frames: list[bytes]) -> None:
        aborted = unpack_abort(frames)
        if aborted is not None:
            self._decode_gave_up(aborted)
            return
        wanted = unpack(frames)
        if wanted is None:
            message = "dropped a message of another kind from a decode server: %.40r"
            self._log.warning("kind", message, frames[:1])
            return
        self._decode_wants(wanted)

    def _decode_wants(self, wanted: Wanted) -> None:
        manager, room = self._manager, wanted.room
        with self._lock:
            failure = None if room in self._open else self._given_up_here.get(room)
        if failure is not None:
            self._tell(room, [wanted], failure)
            return
        if manager.request_status.get(room) not in (None, Poll.BOOTSTRAPPING):
            return  # under way or over: whoever asks again has missed its chance
        infos = manager.transfer_infos.setdefault(room, {})
        infos[wanted.node_id] = wanted
        unlike = self._difference(wanted)
        if unlike is not None:
            manager.update_status(room, Poll.BOOTSTRAPPING)
            self._fail(room, f"prefill and decode have different KV: {unlike}")
            self._tell(room, [wanted], f"prefill and decode have different KV: {unlike}")
        elif len(infos) >= wanted.n_peers:
            manager.resolve_kv_replica_factor(infos)
            manager.req_to_decode_prefix_len[room] = wanted.decode_prefix_len
            manager.update_status(room, Poll.WAITING_FOR_INPUT)

    def _difference(self, wanted: Wanted) -> str | None:
        """Say why what decode wants is not what this rank has, or None."""
        n_buffers, shape = len(self._shape.pages), wanted.shape
        unlike = stages.difference(self._stage, n_buffers, wanted.layers, shape)
        if unlike is not None:
            return unlike
        if wanted.layers:
            shape = stages.Stages(wanted.layers, len(shape.pages)).part(shape, self._stage.stage)
        return difference(self._shape, self._split, shape, wanted.split)

    def _decode_gave_up(self, room: int) -> None:
        with self._lock:
            is_open = room in self._open
            if not is_open:
                _remember(self._given_up_there, room, "decode gave the request up before it came to prefill")
        if is_open:
            if self._manager.request_status.get(room) not in (None, Poll.SUCCESS):
                self._fail(room, "decode gave the request up")
        else:  # SGLang has no such request yet, and may never have
            self._manager.transfer_infos.pop(room, None)
            self._manager.req_to_decode_prefix_len.pop(room, None)
            self._manager.request_status.pop(room, None)

    # --- what SGLang's scheduler does; nothing here waits for another server

    def open(self, room: int) -> None:
        """Take note that SGLang has the request; fails it if decode gave it up before."""
        with self._lock:
            self._open.add(room)
            self._given_up_here.pop(room, None)
            failure = self._given_up_there.pop(room, None)
        if failure is not None:
            self._fail(room, failure)

    def send(self, room: int, chunk: Chunk) -> None:
        """Have a chunk offered to whoever wants it."""
        wanted = list((self._manager.transfer_infos.get(room) or {}).values())
        real = [w for w in wanted if not w.is_dummy and self._place(w) is not None]
        if not real:
            if chunk.is_last:
                self._manager.update_status(room, Poll.SUCCESS)
            return
        with self._lock:
            outgoing = self._outgoing.get(room)
            if outgoing is None:
                outgoing = self._outgoing[room] = Outgoing(self._transfers)
        # all chunks of a request go through one thread: they are offered in order
        worker = self._workers[zlib.crc32(real[0].node_id.encode()) % len(self._workers)]

        def offer() -> None:
            with about(str(room)):
                self._offer(outgoing, real, chunk)

        worker.do(offer)

    def progress(self, room: int) -> tuple[Progress, str | None]:
        """Say where a request's transfer is, and why it failed if it did."""
        with self._lock:
            outgoing = self._outgoing.get(room)
        return (Progress.PENDING, None) if outgoing is None else (outgoing.progress(), outgoing.failure)

    def close(self, room: int, failure: str | None) -> None:
        """Withdraw what is offered of a request, whose pages may then be reused; tell decode of a ``failure``."""
        with self._lock:
            was_open = room in self._open
            self._open.discard(room)
            outgoing = self._outgoing.pop(room, None)
            if was_open and failure is not None:
                _remember(self._given_up_here, room, failure)
        if outgoing is not None:
            outgoing.close()
        if was_open and failure is not None:
            self._tell(room, list((self._manager.transfer_infos.get(room) or {}).values()), failure)

    # --- behind them

    def _offer(self, outgoing: Outgoing, wanted: Sequence[Wanted], chunk: Chunk) -> None:
        try:
            for event in chunk.ready:
                event.synchronize()  # type: ignore[attr-defined]  # a torch.cuda.Event
            states = state_items(chunk.states, len(self._rows.states))
            for want in wanted:
                _check_counts(want, chunk, states)
                target = Target(want.node_id, want.name)
                first, pages, end = self._pages(want, chunk)
                outgoing.offer(target, first, pages)
                if chunk.is_last and self._place(want) == 0 and self._stage.is_last:
                    assert chunk.slot is not None, "SGLang sends the metadata with the last chunk"
                    outgoing.offer(target, end, self._rows.end(states, chunk.slot))
            if chunk.is_last:
                outgoing.complete()
        except Exception as error:  # noqa: BLE001 - the top of a worker's loop: this request fails, the others go on
            outgoing.fail(f"prefill could not offer the KV: {error}")
            self._boundary.note("put", error)

    def _place(self, want: Wanted) -> int | None:
        """Return which of the ranks that a decode rank takes from this one is, or None if it is none of them."""
        if not self._split.is_apart_from(want.split):
            return 0
        return HeadRows(self._rows.pages, self._split, want.split).place

    def _pages(self, want: Wanted, chunk: Chunk) -> tuple[int, Spans, int]:
        """Return the first row of a chunk's pages, all of its rows, and the row behind all pages of the request."""
        buffers = self._rows.pages
        n_buffers = len(buffers.addresses)
        n_before, n_all = 0, n_buffers
        if want.layers:
            layers = stages.Stages(want.layers, len(want.shape.pages))
            n_before, n_all = layers.n_before(self._stage.stage), layers.n_buffers
        if not self._split.is_apart_from(want.split):
            first = n_before * want.n_pages + n_buffers * chunk.first_page
            return first, buffers.spans(chunk.pages), n_all * want.n_pages
        heads = HeadRows(buffers, self._split, want.split)
        assert heads.place is not None, "who has nothing for a decode rank is not asked"
        of_a_source = heads.n_rows(want.n_pages)
        of_a_buffer = len(heads.sources) * of_a_source // n_buffers
        first = n_before * of_a_buffer + heads.place * of_a_source + heads.n_rows(chunk.first_page)
        return first, heads.outgoing(chunk.pages), n_all * of_a_buffer

    def _fail(self, room: int, reason: str) -> None:
        self._manager.record_failure(room, reason)
        self._manager.update_status(room, Poll.FAILED)

    def _tell(self, room: int, wanted: Sequence[Wanted], reason: str) -> None:
        targets = [(w.host, w.port) for w in wanted if not w.is_dummy]
        if targets:
            self._notifier.do(
                lambda: self._manager.send_kv_status_message(
                    targets=targets, bootstrap_room=room, status=Poll.FAILED, failure_reason=reason
                )
            )

    def stop(self) -> None:
        """End the threads and withdraw everything. Idempotent."""
        self._mailbox.close()
        for worker in (*self._workers, self._notifier):
            worker.close()
        with self._lock:
            outgoing, self._outgoing = list(self._outgoing.values()), {}
        for one in outgoing:
            one.close()


def _remember(rooms: OrderedDict[int, str], room: int, reason: str) -> None:
    rooms[room] = reason
    while len(rooms) > _MAX_REMEMBERED:
        rooms.popitem(last=False)


def _check_counts(want: Wanted, chunk: Chunk, states: Sequence[Items]) -> None:
    end = chunk.first_page + len(chunk.pages)
    if end > want.n_pages or (chunk.is_last and end != want.n_pages):
        raise UsageError(f"prefill has {end} pages of the request, decode wants {want.n_pages}")
    counts = tuple(len(items) for items in states)
    if chunk.is_last and counts != want.n_states:
        raise UsageError(f"prefill has {counts} states of the request, decode wants {want.n_states}")


class P2PKVSender(CommonSender):
    """One request at prefill. Its methods are called by SGLang's scheduler and never wait for another server."""

    supports_host_tensor_indices = False

    def __init__(
        self, mgr: object, bootstrap_addr: str, bootstrap_room: int, *args: bool, **options: bool
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)
        self._side().open(bootstrap_room)

    def _side(self) -> PrefillSide:
        side = self.kv_mgr.side
        assert isinstance(side, PrefillSide)
        return side

    @property
    def boundary(self) -> Boundary:
        """Its manager's."""
        boundary: Boundary = self.kv_mgr.boundary
        return boundary

    def _poll_with_status(self, check_status: object) -> int:
        if self.conclude_state is None:
            self._settle()
        return super()._poll_with_status(check_status)

    @guarded("poll", miss=None)
    def _settle(self) -> None:
        progress, failure = self._side().progress(self.bootstrap_room)
        if progress is Progress.DONE:
            self.kv_mgr.update_status(self.bootstrap_room, Poll.SUCCESS)
        elif progress is Progress.FAILED:
            self.kv_mgr.record_failure(self.bootstrap_room, failure or "the transfer failed")
            self.kv_mgr.update_status(self.bootstrap_room, Poll.FAILED)

    def clear(self) -> None:
        # before SGLang's own part, which forgets whom to tell
        self._close()
        super().clear()

    def abort(self) -> None:
        self._give_up()
        super().abort()

    @guarded("abort", miss=None)
    def _give_up(self) -> None:
        self._side().close(self.bootstrap_room, "prefill aborted the request")

    @guarded("clear", miss=None)
    def _close(self) -> None:
        room = self.bootstrap_room
        is_done = self.kv_mgr.request_status.get(room) == Poll.SUCCESS
        reason = None if is_done else self.kv_mgr.failure_records.get(room, "prefill gave the request up")
        self._side().close(room, reason)
