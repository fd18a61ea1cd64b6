"""SGLang prefill and decode without SGLang: two real nodes, and one request after the other between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from cluster import eventually
from device_buffers import DeviceBuffer
from p2pkv import Config, Node
from p2pkv.integrations.boundary import Boundary
from p2pkv.integrations.sglang.pd.decode import DecodeSide
from p2pkv.integrations.sglang.pd.prefill import Chunk, PrefillSide
from p2pkv.integrations.sglang.pd.rooms import Incoming
from p2pkv.integrations.sglang.pd.rows import RequestRows, memories
from p2pkv.integrations.sglang.pd.wire import node_id, unpack
from sglang_manager import Manager

N_BUFFERS, N_PAGES, PAGE_BYTES = 4, 16, 256 << 10
PAGES = np.arange(N_PAGES, dtype=np.int32)
SETTLE_S = 10.0

Allocate = Callable[[int], DeviceBuffer]


def engine_args(
    pointers: list[int], lengths: list[int], item_lengths: list[int], aux: NDArray[np.uint8], **more: Any
) -> SimpleNamespace:
    """Return what SGLang tells a manager of KV buffers, of ``aux`` with a row a request, and of ``more``."""
    return SimpleNamespace(
        kv_data_ptrs=pointers,
        kv_data_lens=lengths,
        kv_item_lens=item_lengths,
        aux_data_ptrs=[aux.ctypes.data],
        aux_data_lens=[aux.nbytes],
        aux_item_lens=[aux[0].nbytes],
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        **more,
    )


class Side:
    """One server: buffers as SGLang has them, a manager, a node."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        join: Sequence[str],
        *,
        readable: bool,
        allocate: Allocate | None = None,
        **settings: Any,
    ) -> None:
        """``allocate``: makes the device memory that the KV is in; ``kv`` is of no use then."""
        self.kv = np.zeros((N_BUFFERS, N_PAGES, PAGE_BYTES), np.uint8)
        self.aux = np.zeros((4, 64), np.uint8)
        self.device = None if allocate is None else allocate(self.kv.nbytes)
        base = self.kv.ctypes.data if self.device is None else self.device.address
        self.args = engine_args(
            [base + i * self.kv[0].nbytes for i in range(N_BUFFERS)],
            [buffer.nbytes for buffer in self.kv],
            [PAGE_BYTES] * N_BUFFERS,
            self.aux,
        )
        self.manager = Manager(self.args, context)
        self.node = Node.start(
            Config(
                node_id=node_id("127.0.0.1", self.manager.rank_port),
                join=list(join),
                pool_size="64KiB",
                **settings,
            )
        )
        for address, nbytes in memories(self.args):
            self.node.register_address(address, nbytes, readable=readable)
        self.rows = RequestRows.of(self.args)
        self.boundary = Boundary("a test", self.node.metrics)

    def members(self) -> dict[str, int]:
        return {m.node_id: m.boot_epoch for m in self.node.members()}


class Servers:
    """A prefill and a decode server in this process, and one request after the other between them."""

    def __init__(
        self, join: str, *, p: Allocate | None = None, d: Allocate | None = None, **settings: Any
    ) -> None:
        """``p`` and ``d``: what makes the device memory of prefill and decode."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.p = Side(self._context, [join], readable=True, allocate=p, **settings)
        self.d = Side(self._context, [join], readable=False, allocate=d, **settings)
        eventually(lambda: len(self.d.members()) == len(self.p.members()) == 2, SETTLE_S)
        self.heal()
        self.prefill = PrefillSide(
            self.p.manager,
            self.p.rows,
            self.p.boundary,
            SimpleNamespace(
                meet=self.p.node.transfers.meet,
                put_async=lambda *given, **options: self.put(*given, **options),
            ),
        )
        self.decode = DecodeSide(
            self.d.manager,
            self.d.rows,
            self.d.boundary,
            lambda *given, **options: self.grant(*given, **options),
            self.d.members,
        )
        self._to_prefill = self._context.socket(zmq.PUSH)
        self._to_prefill.connect(f"tcp://127.0.0.1:{self.p.manager.rank_port}")
        self._n_rooms = 0

    def heal(self) -> None:
        """Have both sides use their nodes as they are."""
        self.put: Any = self.p.node.transfers.put_async
        self.grant: Any = self.d.node.transfers.grant

    def ask(self) -> tuple[int, Incoming]:
        """Have decode grant all its pages to a new request, and prefill know of it."""
        self._n_rooms += 1
        room = self._n_rooms
        for manager in (self.p.manager, self.d.manager):
            manager.update_status(room, 1)
        self.prefill.open(room)
        info = {"rank_ip": "127.0.0.1", "rank_port": self.p.manager.rank_port, "is_dummy": False}
        receiver = SimpleNamespace(
            bootstrap_addr="a",
            bootstrap_room=room,
            bootstrap_infos=[info],
            prefill_info=SimpleNamespace(attn_tp_size=1, pp_size=1),
        )
        incoming = self.decode.grant(receiver, PAGES, 0, None)
        message = self.decode.wanted(room, PAGES, None, 0, 1, is_dummy=False)
        assert unpack(message) is not None
        self._to_prefill.send_multipart(message)
        eventually(lambda: room in self.p.manager.transfer_infos, SETTLE_S)
        return room, incoming

    def send(self, room: int, n_chunks: int = 4) -> None:
        """Have prefill offer everything, in chunks."""
        for pages in np.array_split(PAGES, n_chunks):
            first = int(pages[0])
            is_last = first + len(pages) == N_PAGES
            self.prefill.send(room, Chunk(pages, first, is_last, 1 if is_last else None, None, ()))

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self._to_prefill.close(linger=0)
        for side in (self.p, self.d):
            side.node.close()
            side.manager.close()
        self._context.term()
