"""NIXL with its UCX backend: reads of registered memory, addresses known, no look-up and no proof.

Over ``cma`` a read is one copy by the kernel, from the owner's memory to the reader's. UCX has no error handling there,
which NIXL asks for by default, so NIXL is told to do without. An owner without a progress thread does nothing at all
while it is read from, so that a read that ends is one that the kernel made.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from nixl._api import nixl_agent, nixl_agent_config, nixlBind  # reads its log level when imported

from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base
from p2pkv_bench.working_set import Destination, Source

_PATIENCE_S = 10.0
_ERRORS = tuple(getattr(nixlBind, name) for name in dir(nixlBind) if name.endswith("Error"))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise BenchError(f"nixl can't {what}: {error}") from error


class _Agent:
    """An agent whose memory is registered."""

    def __init__(self, name: str, options: base.Options, memory: tuple[int, int]) -> None:
        with _translated(f"start with UCX_TLS={options['tls']}"):
            config = nixl_agent_config(backends=[], enable_prog_thread=options["progress_thread"])
            self.nixl = nixl_agent(name, config)
            is_cma = "cma" in options["tls"]
            with _environment(UCX_TLS=options["tls"]):
                self.nixl.create_backend("UCX", {"ucx_error_handling_mode": "none" if is_cma else "peer"})
        with _translated(f"register {memory[1]} bytes"):
            self._registered = self.nixl.register_memory([(*memory, 0, "")], "DRAM")

    def close(self) -> None:
        with _translated("deregister memory"):
            self.nixl.deregister_memory(self._registered)
        del self.nixl
        gc.collect()  # its thread ends when nobody has the agent any more


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """UCX reads its settings from the environment when a context is made."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Owner(base.Owner):
    def __init__(self, source: Source, options: base.Options) -> None:
        super().__init__(source, options)
        self._agent = _Agent("owner", options, (source.address, source.array.nbytes))

    def publish(self, page_nbytes: int, n_pages: int) -> Any:
        metadata = base64.b64encode(self._agent.nixl.get_agent_metadata()).decode()
        return metadata, self.source.address, os.getpid()

    def close(self) -> None:
        self._agent.close()


class Reader(base.Reader):
    def __init__(self, destination: Destination, options: base.Options, number: int) -> None:
        super().__init__(destination, options, number)
        self._agent: _Agent | None = None
        self._metadata = ""
        self._owner = ""
        self._remote = 0

    def meet(self, page_nbytes: int, published: Any) -> None:
        self._metadata, self._remote, pid = published
        if "cma" in self.options["tls"]:
            _check_attach(pid, self._remote)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """An agent of its own for each turn if it spins; otherwise one for all turns."""
        if self._agent is None:
            memory = self.destination.address, self.destination.array.nbytes
            self._agent = _Agent(f"reader-{self.number}", self.options, memory)
            with _translated("meet the owner"):
                self._owner = self._agent.nixl.add_remote_agent(base64.b64decode(self._metadata))
        try:
            yield
        finally:
            if self.options["progress_thread"]:
                self.close()

    def prepare(self, moves: Sequence[Move]) -> None:
        self._read(
            moves[-1].spans[:1].tolist()
        )  # the first read of an agent connects; descriptors belong to calls

    def fetch(self, move: Move) -> None:
        self._read(move.spans.tolist())

    def _read(self, spans: list[list[int]]) -> None:
        assert self._agent is not None
        agent, here = self._agent.nixl, self.destination.address
        with _translated("read"):
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
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _check_attach(pid: int, address: int) -> None:
    """Raise BenchError if the kernel does not let this process read that one."""
    word = ctypes.c_uint64()
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(word), 8)
    there = (ctypes.c_uint64 * 2)(address, 8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(pid, here, 1, there, 1, 0) != 8:
        reason = os.strerror(ctypes.get_errno())
        raise BenchError(f"cross-memory attach to a child is refused here (process_vm_readv: {reason})")


class Registered(base.Registered):
    """Its user's memory, which is made but not touched: a registration for cma or tcp only notes where it is."""

    def __init__(self, options: base.Options) -> None:
        super().__init__(options)
        self._agent: _Agent | None = None

    def start(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes, np.uint8)
        self._agent = _Agent("alone", self.options, (self._memory.ctypes.data, nbytes))

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
