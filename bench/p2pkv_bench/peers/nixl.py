"""NIXL with its UCX backend: reads of registered memory, addresses known, no look-up and no proof."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base
from p2pkv_bench.working_set import Destination, Source

_PATIENCE_S = 10.0


class Owner(base.Owner):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._agent = nixl_agent("owner", nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory([(source.address, source.array.nbytes, 0, "")], "DRAM")

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        return base64.b64encode(self._agent.get_agent_metadata()).decode(), self.source.address

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class Reader(base.Reader):
    def __init__(self, destination: Destination) -> None:
        super().__init__(destination)
        self._agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
        array = destination.array
        self._registered = self._agent.register_memory([(destination.address, array.nbytes, 0, "")], "DRAM")
        self._owner = ""
        self._remote = 0

    def meet(self, page_nbytes: int, published: Any) -> None:
        metadata, self._remote = published
        if not self._owner:
            self._owner = self._agent.add_remote_agent(base64.b64decode(metadata))

    def prepare(self, moves: Sequence[Move]) -> None:
        pass  # a transfer's descriptors belong to its call: every call has other pages

    def fetch(self, move: Move) -> None:
        agent, here = self._agent, self.destination.address
        spans = move.spans.tolist()
        to = agent.get_xfer_descs([(here + local, nbytes, 0) for local, _, nbytes in spans], "DRAM")
        there = agent.get_xfer_descs(
            [(self._remote + remote, nbytes, 0) for _, remote, nbytes in spans], "DRAM"
        )
        handle = agent.initialize_xfer("READ", to, there, self._owner, "")
        state = agent.transfer(handle)
        until = time.monotonic() + _PATIENCE_S
        while state == "PROC" and time.monotonic() < until:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise BenchError(f"a transfer of nixl ended as {state}")

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
