"""Nodes as processes that a test starts, stops, kills and asks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from p2pkv.testing.nursery import nursery
from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import ChildProcess
from p2pkv.transports.ucx import UcxTransport
from patience import PATIENCE

if TYPE_CHECKING:
    from typing_extensions import Self

_NO_UCX = UcxTransport.unavailable()
UCX = pytest.param("ucx", marks=pytest.mark.skipif(_NO_UCX is not None, reason=str(_NO_UCX)))
"""The transport as a test's parameter, skipped with the reason where it can't run."""

_WORKER = str(Path(__file__).with_name("node_worker.py"))


class NodeProcess(ChildProcess):
    """One ``node_worker.py``. ``call`` waits for the answer, ``send`` and ``answer`` are its two halves."""

    def __init__(self, **settings: Any) -> None:
        self.node_id = settings.get("config", {}).get("node_id", "?")
        super().__init__([sys.executable, _WORKER], name=f"node {self.node_id}", popen=nursery(_WORKER).popen)
        self.settings = settings

    def answer(self, timeout: float = 30.0) -> Any:
        return super().answer(timeout * PATIENCE)

    def call(self, command: str, *, patience: float = 30.0, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.answer(patience)

    def start(self) -> NodeProcess:
        self.call("start", **self.settings)
        return self


class Cluster:
    """Several node processes that meet at one join address.

    A call that names no time is none of which the deadline is tested: it has a second, as on a quiet machine, times
    :data:`PATIENCE`.
    """

    def __init__(self, **defaults: Any) -> None:
        self.join = f"127.0.0.1:{free_port()}"
        self._defaults = {"join": [self.join], "pool_size": "16MiB", "deadline": PATIENCE} | defaults
        self.nodes: list[NodeProcess] = []

    def spawn(
        self,
        node_id: str,
        *,
        memory: int = 16 << 20,
        sabotage: str = "",
        readable: bool = False,
        device: str = "",
        shares_copies: bool = False,
        in_memfd: bool = False,
        **config: Any,
    ) -> NodeProcess:
        """Make a process without starting its node; ``device``: a kind of device memory that it has as well.

        With ``shares_copies`` two threads copy all its batches, however small.
        """
        settings = self._defaults | {"node_id": node_id} | config
        node = NodeProcess(
            config=settings,
            memory=memory,
            sabotage=sabotage,
            readable=readable,
            device=device,
            shares_copies=shares_copies,
            in_memfd=in_memfd,
        )
        self.nodes.append(node)
        return node

    def start(self, node_id: str, **options: Any) -> NodeProcess:
        return self.spawn(node_id, **options).start()

    def meet(self, *nodes: NodeProcess) -> None:
        """Wait until each of ``nodes`` knows all of them alive."""
        ids = {node.node_id for node in nodes}

        def met() -> bool:
            return all(
                ids <= {m["node_id"] for m in node.call("members") if m["state"] == "ALIVE"} for node in nodes
            )

        eventually(met, 10.0)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def eventually(condition: Callable[[], bool], seconds: float) -> float:
    """Poll until ``condition`` holds; return how long it took.

    Fails after ``seconds``, the time that a quiet machine may take, times :data:`PATIENCE`. For what is no promise.
    """
    patience = seconds * PATIENCE
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience, f"not so within {patience} s"
        time.sleep(0.02)
    return time.monotonic() - began


def all_are_fetched(node: NodeProcess, keys: list[str], nbytes: int, seconds: float = 5.0) -> None:
    """Fetch until all are hits; fail over a wrong byte.

    A miss is no fault: an owner that is silent for a moment, as one on a busy machine may be, is not waited for.
    """

    def are_there() -> bool:
        answer = node.call("fetch", keys=keys, nbytes=nbytes)
        assert answer["wrong"] == []
        return all(answer["hits"])

    eventually(are_there, seconds)
