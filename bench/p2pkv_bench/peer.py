"""The other process of a benchmark, and how it is told what to do: JSON lines on its stdin and stdout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from p2pkv.config import Config
from p2pkv.node import Node
from p2pkv.transports.base import Transport
from p2pkv_bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

_PATIENCE_S = 120.0
"""For a command of a peer; it ends when its benchmark ends, so this is only for what went wrong."""


class Peer:
    """A process that runs ``module``. It ends with this process, however that ends."""

    def __init__(self, module: str = "p2pkv_bench.worker") -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("P2PKV_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # python -m looks into the working directory first, and a checkout there would come before what is installed
            cwd="/",
            env=environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._answers: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, name="p2pkv-bench-peer", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put('{"error": "the process has ended"}')

    def send(self, command: str, **arguments: object) -> None:
        """Tell it to do something; :meth:`answer` waits for the end of that."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return what the oldest unanswered command returned."""
        try:
            answer = json.loads(self._answers.get(timeout=_PATIENCE_S))
        except Empty:
            raise BenchError(f"the other process did not answer within {_PATIENCE_S:g} s") from None
        if "error" in answer:
            raise BenchError(f"in the other process: {answer['error']}")
        return answer["result"]

    def call(self, command: str, **arguments: object) -> Any:
        """Tell it to do something and wait for the end of that."""
        self.send(command, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(5.0)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Meeting:
    """What the nodes of one benchmark share: a secret of their own and an address to meet at."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="p2pkv-bench-")
        self.folder = Path(self._folder.name)
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            join = f"127.0.0.1:{probe.getsockname()[1]}"
        # One replica, so that a case decides which process's shard has a key's entry.
        self._common = {"join": [join], "secret_file": str(secret), "replicas": 1, "deadline": 10.0}

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
