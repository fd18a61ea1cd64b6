"""Decode's side of SGLang's transfers: it grants its pages to a request, and takes them back before SGLang does.

A request succeeds when every granted row has been pulled and proven, the metadata included; that is known here, without
a word from prefill. Prefill's death is known from the cluster's membership, so it fails its requests within seconds,
and nothing is remembered of it: when it is back, the next request finds it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from p2pkv.errors import UsageError
from p2pkv.integrations.boundary import Boundary, guarded
from p2pkv.integrations.sglang.installed import stage_layers
from p2pkv.integrations.sglang.pd.common import CommonManager, CommonReceiver, Poll, tcp_endpoint
from p2pkv.integrations.sglang.pd.heads import HeadRows, Split, difference
from p2pkv.integrations.sglang.pd.rooms import Absences, Incoming, MakeGrant, Producer, Progress, unmet
from p2pkv.integrations.sglang.pd.rows import Items, RequestRows, Shape, Spans, state_items
from p2pkv.integrations.sglang.pd.stages import Stages
from p2pkv.integrations.sglang.pd.threads import Mailbox, Ticker
from p2pkv.integrations.sglang.pd.wire import Wanted, node_id, pack
from p2pkv.tracing import about

if TYPE_CHECKING:
    from p2pkv.integrations.sglang.pd.common import PrefillInfo

_log = logging.getLogger(__name__)

_WATCH_S = 0.25
"""Between looks at who is still there; deaths take membership seconds to be sure of, so this adds little."""
_MEET_S = 10.0
"""How long a prefill node that SGLang knows may be unknown to p2pkv: it joins while SGLang starts."""
_MAX_GRANT_S = 3600.0


class DecodeSide:
    """What a decode rank's manager does for all its requests. Thread-safe."""

    def __init__(
        self,
        manager: CommonManager,
        rows: RequestRows,
        boundary: Boundary,
        make_grant: MakeGrant,
        members: Callable[[], dict[str, int]],
        split: Split | None = None,
        stage_layers: Callable[[int, int], tuple[int, ...]] = stage_layers,
    ) -> None:
        """``members`` returns the boot epoch of each node of the cluster by its id; ``split`` is this rank's.

        ``stage_layers`` returns the layers of each stage, given a model's layers and the number of stages.
        """
        self._manager = manager
        self._split = Split() if split is None else split
        self._rows = rows
        self._shape = rows.shape
        self._make_grant = make_grant
        self._members = members
        self._stage_layers = stage_layers
        self._names = (f"sglang {secrets.token_hex(8)} {n}" for n in count())
        self._lock = threading.Lock()  # guards _incoming and _finding
        # weak: a request that SGLang drops takes its grants with it
        self._incoming: weakref.WeakValueDictionary[int, Incoming] = weakref.WeakValueDictionary()
        self._finding: dict[str, Future[bool]] = {}
        self._unfit: dict[str, str] = {}  # of the scheduler's thread alone
        self._absences = Absences()  # of the ticker's thread
        self._finder = ThreadPoolExecutor(4, thread_name_prefix="p2pkv-pd-find")
        self._mailbox = Mailbox(manager.server_socket, self._take, boundary)
        self._ticker = Ticker(self._watch, period=_WATCH_S, boundary=boundary)

    # --- what SGLang's scheduler does

    def grant(
        self, receiver: P2PKVReceiver, pages: Items, slot: int, states: Sequence[object] | None
    ) -> Incoming:
        """Let prefill's bytes of a request into its pages, states and metadata slot."""
        incoming = Incoming(next(self._names), receiver.bootstrap_addr, receiver.bootstrap_room)
        incoming.producers = tuple(
            Producer(node, self._members().get(node)) for node in _producers(receiver.bootstrap_infos or [])
        )
        stages = self._stages_of(receiver.prefill_info)
        incoming.layers = () if stages is None else stages.layers
        rows = self._expected(pages, state_items(states, len(self._rows.states)), slot, receiver.prefill_info)
        with about(str(receiver.bootstrap_room)):
            incoming.grant(self._make_grant, rows, timeout=min(self._manager.waiting_timeout, _MAX_GRANT_S))
        with self._lock:
            self._incoming[receiver.bootstrap_room] = incoming
        return incoming

    def _expected(self, pages: Items, states: Sequence[Items], slot: int, prefill: PrefillInfo) -> Spans:
        source, stages = self._split_of(prefill), self._stages_of(prefill)
        parts = [self._rows.pages] if stages is None else stages.parts(self._rows.pages)
        spans = [
            HeadRows(part, source, self._split).incoming(pages)
            if self._split.is_apart_from(source)
            else part.spans(pages)
            for part in parts
        ]
        return np.concatenate([*spans, self._rows.end(states, slot)])

    def _stages_of(self, prefill: PrefillInfo) -> Stages | None:
        """Return how the layers are shared among prefill's pipeline stages; None if it has one stage."""
        if prefill.pp_size == 1:
            return None
        n_buffers = len(self._shape.pages)
        n_layers = n_buffers if self._manager.is_mla_backend else n_buffers // 2
        return Stages(self._stage_layers(n_layers, prefill.pp_size), n_buffers)

    def _split_of(self, prefill: PrefillInfo) -> Split:
        return msgspec.structs.replace(self._split, size=prefill.attn_tp_size, rank=0)

    def unequal(self, prefill: PrefillInfo) -> str | None:
        """Say why what a prefill server's ranks have can't be shared among those of this one, or None."""
        try:
            stages = self._stages_of(prefill)
        except UsageError as error:
            return str(error)
        if stages is not None and (stages.problem() or self._shape.states):
            return stages.problem() or "prefill has pipeline stages, and states can't be taken from several"
        source = self._split_of(prefill)
        if source.size == self._split.size or self._manager.is_mla_backend:
            return None
        if not self._split.n_heads:
            return (
                f"prefill splits its heads over {source.size} ranks and decode over {self._split.size}; with draft "
                "layers, or where SGLang does not say how many heads there are, both need the same number"
            )
        return difference(self._shape, self._split, self._shape_of(source), source)

    def _shape_of(self, source: Split) -> Shape:
        """Return this rank's form as a rank of another split would have it."""
        unit = self._split.n_heads_here
        pages = tuple(n // unit * source.n_heads_here for n in self._shape.pages)
        return msgspec.structs.replace(self._shape, pages=pages)

    def wanted(
        self,
        room: int,
        pages: Items,
        states: Sequence[object] | None,
        prefix_len: int,
        n_peers: int,
        *,
        is_dummy: bool,
    ) -> list[bytes]:
        """Return what to tell prefill of a request that was granted."""
        with self._lock:
            incoming = self._incoming[room]
        items = state_items(states, len(self._rows.states))
        manager = self._manager
        return pack(
            Wanted(
                room=room,
                name=incoming.name,
                node_id=node_id(manager.local_ip, manager.rank_port),
                host=manager.local_ip,
                port=manager.rank_port,
                n_pages=len(pages),
                n_states=tuple(len(i) for i in items),
                decode_prefix_len=prefix_len,
                n_peers=n_peers,
                is_dummy=is_dummy,
                shape=self._shape,
                split=self._split,
                layers=incoming.layers,
            )
        )

    def find(self, address: str, look: Callable[[str], bool]) -> bool:
        """Ask the bootstrap server at ``address`` how prefill is laid out; ``look`` may block, this does not.

        SGLang's scheduler asks again a second later for what was not there yet.
        """
        with self._lock:
            future = self._finding.get(address)
            if future is None:
                future = self._finding[address] = self._finder.submit(look, address)
        if not future.done():
            return False
        try:
            is_found = future.result()
            self._unfit.pop(address, None)
            return is_found
        except RuntimeError as error:  # SGLang's word for another page size, dtype or layout
            self._unfit[address] = str(error)
            raise
        finally:
            with self._lock:
                self._finding.pop(address, None)

    def why_not_found(self, address: str) -> str:
        """Say why :meth:`find` has found nothing so far."""
        return self._unfit.get(address, f"prefill server {address} did not answer so far")

    # --- what happens meanwhile

    def _take(self, frames: list[bytes]) -> None:
        """Take what prefill says: that it gave a request up."""
        status = self._manager.parse_kv_status_message(frames)
        if status is None:
            return
        room, poll, _, reason = status
        if poll == Poll.FAILED:
            self._fail(room, f"prefill: {reason}" if reason else "prefill gave the request up")

    def _watch(self) -> None:
        with self._lock:
            waiting = list(self._incoming.values())
        members = self._members() if waiting else {}
        now = time.monotonic()
        expected = {producer for incoming in waiting for producer in incoming.producers}
        gone = self._absences.gone(expected, members.get, now)
        for incoming in waiting:
            for producer in incoming.producers:
                if producer in gone:
                    self._forget(incoming.bootstrap_addr, producer.node_id)
                    self._fail(
                        incoming.room, f"prefill's node {producer.node_id} is dead or was started anew"
                    )
            incoming.producers = tuple(
                producer if producer.boot else Producer(producer.node_id, members.get(producer.node_id))
                for producer in incoming.producers
            )
            stranger = unmet(incoming.producers)
            if stranger is not None and now - incoming.since > _MEET_S:
                self._forget(incoming.bootstrap_addr, stranger)
                self._fail(
                    incoming.room,
                    f"prefill's node {stranger} is not in the cluster of this one; P2PKV_JOIN and P2PKV_SECRET_FILE "
                    "must be the same for both",
                )

    def _fail(self, room: int, reason: str) -> None:
        if self._manager.request_status.get(room) not in (None, Poll.FAILED, Poll.SUCCESS):
            self._manager.record_failure(room, reason)
            self._manager.update_status(room, Poll.FAILED)

    def _forget(self, address: str, node: str) -> None:
        """Have the next request to a prefill server ask anew where its ranks are."""
        manager = self._manager
        endpoints: set[str] = set()
        with manager.connection_lock:
            for key, infos in list(manager.connection_pool.items()):
                if key.startswith(f"{address}_") and any(_node_of(info) == node for info in infos):
                    del manager.connection_pool[key]
                    endpoints.update(tcp_endpoint(info["rank_ip"], int(info["rank_port"])) for info in infos)
            if endpoints:
                manager.prefill_info_table.pop(address, None)
        for endpoint in endpoints:
            CommonReceiver.disconnect_endpoint(endpoint)
        if endpoints:
            _log.warning("prefill server %s is gone with node %s; its requests fail", address, node)

    def stop(self) -> None:
        """End the threads and revoke everything. Idempotent."""
        self._ticker.close()
        self._mailbox.close()
        self._finder.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            waiting = list(self._incoming.values())
        for incoming in waiting:
            incoming.close()


def _node_of(info: dict[str, Any]) -> str:
    return node_id(info["rank_ip"], int(info["rank_port"]))


def _producers(infos: Sequence[dict[str, Any]]) -> list[str]:
    return [_node_of(info) for info in infos if not info["is_dummy"]]


class P2PKVReceiver(CommonReceiver):
    """One request at decode. Its methods are called by SGLang's scheduler.

    After :meth:`clear`, :meth:`abort` or a failed :meth:`poll` nothing writes to the request's pages any more, whatever
    prefill does; so SGLang may release them at once and has nothing to defer.
    """

    def __init__(self, mgr: object, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._incoming: Incoming | None = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def _side(self) -> DecodeSide:
        side = self.kv_mgr.side
        assert isinstance(side, DecodeSide)
        return side

    @property
    def boundary(self) -> Boundary:
        """Its manager's."""
        boundary: Boundary = self.kv_mgr.boundary
        return boundary

    def init(self, prefill_dp_rank: int) -> None:
        problem = self.kv_mgr.unequal(self.bootstrap_addr)
        if problem is None:
            super().init(prefill_dp_rank)
        else:
            self._fail(problem)

    def _register_kv_args(self) -> bool:
        # every request says what its KV looks like; prefill keeps nothing of a decode server
        return self.bootstrap_infos is not None

    def send_metadata(
        self,
        kv_indices: Items,
        aux_index: int | None = None,
        state_indices: Sequence[object] | None = None,
        decode_prefix_len: int | None = None,
        **destination: object,
    ) -> None:
        if self.bootstrap_infos is not None:
            slot = -1 if aux_index is None else aux_index  # no buffer has it: refused there
            self._incoming = self._grant(kv_indices, slot, state_indices)
            if self._incoming is None:
                self._fail("decode could not grant the pages; its log says why")
                return
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **destination)

    @guarded("grant", miss=None)
    def _grant(self, pages: Items, slot: int, states: Sequence[object] | None) -> Incoming:
        return self._side().grant(self, pages, slot, states)

    def poll(self) -> int:
        if self._incoming is not None and self.conclude_state is None:
            self._settle()
        status = super().poll()
        if status == Poll.FAILED:
            self._revoke()
        return status

    @guarded("poll", miss=None)
    def _settle(self) -> None:
        assert self._incoming is not None
        progress = self._incoming.progress()
        if progress is Progress.DONE:
            self.kv_mgr.update_status(self.bootstrap_room, Poll.SUCCESS)
        elif progress is Progress.FAILED:
            self._fail(self._incoming.failure or "the transfer was given up")

    def clear(self) -> None:
        self._revoke()
        super().clear()

    def abort(self) -> None:
        self._revoke()
        super().abort()
        if self.bootstrap_addr not in self.kv_mgr.prefill_info_table:
            # SGLang aborts when it has asked for a prefill server in vain, and says no more than that it aborted
            reason = self._side().why_not_found(self.bootstrap_addr)
            self.kv_mgr.record_failure(self.bootstrap_room, f"aborted: {reason}")

    def failure_exception(self) -> None:
        self._revoke()
        self._tell_of_abort()
        super().failure_exception()

    @guarded("abort", miss=None)
    def _tell_of_abort(self) -> None:
        self.ensure_abort_notified()

    def is_abort_release_safe(self) -> bool:
        """Say whether nothing writes to the request's pages any more; true once it failed or was cleared."""
        return self._incoming is None or self._incoming.is_closed

    @guarded("revoke", miss=None)
    def _revoke(self) -> None:
        if self._incoming is not None:
            self._incoming.close()

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, Poll.FAILED)
