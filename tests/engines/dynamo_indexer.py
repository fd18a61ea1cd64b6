"""Dynamo's own indexer of KV events, from its wheel, as a process that a test points at an engine's events and asks."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import eventually
from demo.xpyd.real_engines import ROOT, lasting_port

if TYPE_CHECKING:
    from typing_extensions import Self

PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"
_MODEL = "m"


class DynamoIndexer:
    """``python -m dynamo.indexer``."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._port = lasting_port()

    def __enter__(self) -> Self:
        command = [PYTHON, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
            )
        eventually(self._answers, 60.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        try:
            self._ask("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def register(self, instance: int, endpoint: str, *, block_size: int, replay: str | None = None) -> None:
        """Have it follow the events of an instance, and first those that are told again at ``replay``."""
        said: dict[str, object] = {"instance_id": instance, "endpoint": endpoint}
        said |= {"model_name": _MODEL, "block_size": block_size}
        if replay is not None:
            said["replay_endpoint"] = replay
        self._ask("/register", said)

    def tokens_at(self, instance: int, tokens: list[int]) -> tuple[int, int]:
        """Return how many of a prompt's first tokens an instance has: on its device, and there or in host memory."""
        found = json.loads(self._ask("/query", {"token_ids": tokens, "model_name": _MODEL}))
        at = found["instances"].get(str(instance), {"gpu": 0, "cpu": 0})
        return at["gpu"], at["cpu"]

    def _ask(self, path: str, body: object = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - http
            read: bytes = answer.read()
            return read
