"""The other process of a benchmark, and how it is told what to do: JSON lines on its stdin and stdout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from p2pkv.config import Config
from p2pkv.node import Node
from p2pkv.testing.ports import free_port
from p2pkv.testing.processes import ChildEndedError, ChildProcess, RefusedError
from p2pkv.transports.base import Transport
from p2pkv_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

_PATIENCE_S = 120.0
"""For a command of a peer; it ends when its benchmark ends, so this is only for what went wrong."""
_CLOSE_S = 5.0
"""A node is closed within milliseconds; a busy machine may take a second."""


class Peer(ChildProcess):
    """A process that runs ``module``, after ``prefix``. It ends with this process, however that ends."""

    def __init__(self, module: str = "p2pkv_bench.worker", *, prefix: Sequence[str] = ()) -> None:
        super().__init__(
            [*prefix, sys.executable, "-m", module],
            name="the other process",
            environ={name: value for name, value in os.environ.items() if not name.startswith("P2PKV_")},
            # python -m looks into the working directory first, and a checkout there would come before what is installed
            folder="/",
        )

    def answer(self, timeout: float = _PATIENCE_S) -> Any:
        """Return what the oldest unanswered command returned. Raises :class:`BenchError`."""
        try:
            return super().answer(timeout)
        except RefusedError as error:
            raise BenchError(f"in the other process: {error}") from None
        except (TimeoutError, ChildEndedError) as error:
            raise BenchError(str(error)) from None

    def call(self, command: str, **arguments: object) -> Any:
        """Tell it to do something and wait for the end of that."""
        self.send(command, **arguments)
        return self.answer()

    def close(self, patience: float = _CLOSE_S) -> None:
        """End the process."""
        super().close(patience)


class Meeting:
    """What the nodes of one benchmark share: a secret of their own and an address to meet at."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="p2pkv-bench-")
        self.folder = Path(self._folder.name)
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        join = f"127.0.0.1:{free_port()}"
        # One replica, so that a case decides which process's shard has a key's entry. Reads of an earlier size must not
        # keep its pages, for which the next size's would go.
        self._common = {
            "join": [join],
            "secret_file": str(secret),
            "replicas": 1,
            "touch": False,
            "deadline": 10.0,
        }

    def settings(self, node_id: str, **more: object) -> dict[str, object]:
        """Return one node's settings."""
        return self._common | {"node_id": node_id} | more

    def start(self, node_id: str, *, extra: Sequence[Transport] = (), **more: object) -> Node:
        """Start a node in this process."""
        return Node.start(Config.load(self.settings(node_id, **more), environ={}), extra_transports=extra)

    def close(self) -> None:
        """Delete the secret."""
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
