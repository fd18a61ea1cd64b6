"""A router as a process of its own, for tests that put it before real engines."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

from cluster import eventually
from demo.xpyd.real_engines import lasting_port


class RouterProcess:
    """A router with ``options`` of ``p2pkv-proxy``, beside ``--listen``."""

    def __init__(self, *options: str) -> None:
        self.port = lasting_port()
        command = [sys.executable, "-c", "from p2pkv_proxy.cli import main; main()"]
        self._process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{self.port}", *options])

    def wait_until_ready(self) -> None:
        """Block until it has a prefill and a decode that are ready."""
        eventually(lambda: self.get("/healthz") == {"ready": True, "roles": ["decode", "prefill"]}, 60.0)

    def get(self, path: str) -> object:
        """Return a page of its, None if it doesn't answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
                return json.load(response)
        except OSError:
            return None

    def instances(self) -> list[dict[str, Any]]:
        """Return what it knows of each instance."""
        known = self.get("/instances")
        assert isinstance(known, list), known
        return known

    def post(self, path: str, body: object, *, timeout: float = 180.0) -> bytes:
        """Return the whole answer to a request. Raises ``urllib.error.HTTPError`` where it is an error."""
        return post(self.port, path, body, timeout=timeout)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        self._process.wait()


def post(port: int, path: str, body: object, *, timeout: float = 180.0) -> bytes:
    """Send a request to whoever serves ``port``; return the whole answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
        return bytes(response.read())
