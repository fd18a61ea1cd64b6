"""Uses p2pkv within its image, as the image's user: every command, a node with its page, the router, the demo.

Run by ``make test-image``; prints what it did, and fails at the first thing that is not as it should be.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 120.0


def main() -> None:
    assert os.getuid() != 0, "the image runs as root"
    join, metrics, router = (f"127.0.0.1:{free_port()}" for _ in range(3))
    port = metrics.partition(":")[2]
    for command in (
        ["p2pkv", "--version"],
        ["p2pkv", "doctor", "--set", "pool_size=16MiB"],
        ["python", "-m", "demo.xpyd.server", "--help"],
        ["p2pkv", "demo"],
    ):
        use(*command)
    node = ["--set", "node_id=a", "--set", f"join={join}", "--set", "pool_size=16MiB"]
    with running("p2pkv", "node", *node, "--set", f"metrics_port={port}"):
        assert "ready" in get(f"http://{metrics}/readyz")
        assert "p2pkv_members" in get(f"http://{metrics}/metrics")
        assert "<html" in get(f"http://{metrics}/").lower()
        for told in (["status"], ["top", "--count", "1"], ["explain", "a page"]):
            use("p2pkv", *told, "--join", join)
    with running("p2pkv-proxy", "--listen", router, "--heartbeats", f"127.0.0.1:{free_port()}"):
        get(f"http://{router}/metrics")
        print("ok: the router", flush=True)


def use(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    print(f"ok: {' '.join(command)}", flush=True)


@contextmanager
def running(*command: str) -> Iterator[None]:
    """Have it run meanwhile; it must end when it is told to, of itself or as the router does, by the signal."""
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM), f"{command} ended with {process.returncode}"


def get(url: str) -> str:
    """Return what is there, as soon as somebody listens."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:  # noqa: S310  # of what was started here
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()
