"""The xPyD demo's processes: instances and the router, ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from demo.cluster import ONE_THREAD
from p2pkv.heartbeat import Role

if TYPE_CHECKING:
    from typing_extensions import Self

START_SECONDS = 120.0
"""Imports and a small model: two seconds, or many on a busy machine."""
CLOSE_SECONDS = 10.0
ROOT = Path(__file__).parents[2]


class StartError(RuntimeError):
    """A process did not come up; the message has the end of what it said."""


class Process:
    """One child. Its output goes to a file that is gone with it."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=ROOT,
            env=os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def first_line(self) -> str:
        """Wait for the line that it says when it is up. Raises :class:`StartError`."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline().decode() if is_there else ""
        if not line:
            raise StartError(f"{self.name} did not start:\n{self.last_words()}")
        return line.strip()

    def last_words(self) -> str:
        """Return the end of its stderr."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 4000))
        return self._said.read().decode(errors="replace")

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()

    def stop(self) -> None:
        """Ask it to end."""
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Wait until it has ended, and make it if need be."""
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()


class Cluster:
    """A router and its instances, by name. Use it in a ``with`` statement."""

    def __init__(
        self, router_options: list[str] | None = None, instance_options: list[str] | None = None
    ) -> None:
        """Start the router."""
        self._join = f"127.0.0.1:{_free_port()}"
        self._heartbeats = f"127.0.0.1:{_free_port()}"
        self._instance_options = instance_options or []
        self.instances: dict[str, Process] = {}
        command = [
            sys.executable,
            "-c",
            "from p2pkv_proxy.cli import main; main()",
            "--listen",
            "127.0.0.1:0",
        ]
        command += ["--heartbeats", self._heartbeats, "--lifetime", "4", "--join", self._join]
        self.router = Process("the router", command + (router_options or []))
        try:
            self.url = self.router.first_line().split("on ")[1].split(",")[0]
        except BaseException:
            self.close()
            raise
        self.urls: dict[str, str] = {}

    def start(self, role: Role, name: str) -> None:
        """Start an instance without waiting for it."""
        command = [sys.executable, "-m", "demo.xpyd.server", "--role", role.value, "--node-id", name]
        command += ["--join", self._join, "--router", self._heartbeats, *self._instance_options]
        self.instances[name] = Process(name, command)

    def wait(self, *names: str) -> None:
        """Wait until these instances are up and the router knows them."""
        for name in names:
            self.urls[name] = json.loads(self.instances[name].first_line())["url"]
        deadline = time.monotonic() + START_SECONDS
        while not set(names) <= {one["id"] for one in self.known() if one["state"] == "ready"}:
            if time.monotonic() > deadline:
                raise StartError(
                    f"the router has not heard of {', '.join(names)}:\n{self.router.last_words()}"
                )
            time.sleep(0.05)

    def known(self) -> list[dict[str, Any]]:
        """Return what the router knows of each instance."""
        found: list[dict[str, Any]] = json.loads(get(f"{self.url}/instances"))
        return found

    def metrics(self) -> dict[str, float]:
        """Return the router's counters by name and labels."""
        lines = get(f"{self.url}/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def stats(self, name: str) -> dict[str, int]:
        """Return an instance's own counters; empty if it is gone."""
        try:
            found: dict[str, int] = json.loads(get(f"{self.urls[name]}/stats"))
        except OSError:
            return {}
        return found

    def close(self) -> None:
        """End all processes."""
        for process in [*self.instances.values(), self.router]:
            process.stop()
        for process in [*self.instances.values(), self.router]:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None:
            for process in [*self.instances.values(), self.router]:
                process.kill()
        self.close()


def get(url: str) -> bytes:
    """Fetch a page."""
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - the router's own
        page: bytes = response.read()
        return page


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
