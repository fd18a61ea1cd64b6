"""The xPyD demo's processes: instances and the router, ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from demo.cluster import ONE_THREAD
from p2pkv.instances.heartbeat import Role
from p2pkv.testing.ports import free_port

if TYPE_CHECKING:
    from typing_extensions import Self

START_SECONDS = 120.0
"""Imports and a small model: two seconds, or many on a busy machine."""
CLOSE_SECONDS = 10.0
_LOOK_S = 0.05
ROOT = Path(__file__).parents[2]


class StartError(RuntimeError):
    """A process did not come up; the message has the end of what it said."""


class Child:
    """A process with a group of its own. What it says on stderr goes to a file that is gone with it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        folder: Path = ROOT,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        """Start it in ``folder``. Without ``stdout`` that goes where stderr goes."""
        self.name = name
        self._said: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=self._said if stdout is None else stdout,
            stderr=self._said,
            cwd=folder,
            env=os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of what it said."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 4000))
        return self._said.read().decode(errors="replace")

    def kill(self) -> None:
        """End it as a crash does, with the processes it has started."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it in the middle of whatever it does: it listens, and says nothing."""
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Ask it to end."""
        self._process.send_signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Wait until it has ended, and make it if need be."""
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()


class Process(Child):
    """A child of ours: it says a line when it is up, and ends when its stdin does."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        super().__init__(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def first_line(self) -> str:
        """Wait for the line that it says when it is up. Raises :class:`StartError`."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline().decode() if is_there else ""
        if not line:
            raise StartError(f"{self.name} did not start:\n{self.last_words()}")
        return line.strip()


class RouterProcess(Process):
    """``p2pkv-proxy`` with ``options`` on a port of its own, at ``url``."""

    def __init__(self, options: Sequence[str]) -> None:
        """Start it and wait until it listens. Raises :class:`StartError`."""
        command = [sys.executable, "-c", "from p2pkv_proxy.cli import main; main()"]
        super().__init__("the router", [*command, "--listen", "127.0.0.1:0", *options])
        try:
            self.url = self.first_line().split("on ")[1].split(",")[0]
        except BaseException:
            self.kill()
            self.close()
            raise

    def known(self) -> list[dict[str, Any]]:
        """Return what the router knows of each instance."""
        found: list[dict[str, Any]] = json.loads(get(f"{self.url}/instances"))
        return found

    def wait(self, *names: str) -> None:
        """Wait until it knows these instances as ready. Raises :class:`StartError`."""
        deadline = time.monotonic() + START_SECONDS
        while not set(names) <= {one["id"] for one in self.known() if one["state"] == "ready"}:
            if time.monotonic() > deadline:
                raise StartError(f"the router has not heard of {', '.join(names)}:\n{self.last_words()}")
            time.sleep(_LOOK_S)

    def metrics(self) -> dict[str, float]:
        """Return the router's counters by name and labels."""
        return samples(f"{self.url}/metrics")


class Cluster:
    """A router and its instances, by name. Use it in a ``with`` statement."""

    def __init__(self, router_options: list[str], instance_options: list[str] | None = None) -> None:
        """Start the router."""
        self._join = f"127.0.0.1:{free_port()}"
        self._heartbeats: list[str] = []
        self._instance_options = instance_options or []
        self.instances: dict[str, Process] = {}
        self._routers: list[RouterProcess] = []
        self._roles: dict[str, Role] = {}
        self.urls: dict[str, str] = {}
        try:
            self.url = self.add_router(router_options)
        except BaseException:
            self.close()
            raise

    def add_router(self, options: list[str]) -> str:
        """Start one more router before the instances that are started from now on; return its address."""
        heartbeats = f"127.0.0.1:{free_port()}"
        router = RouterProcess(
            ["--heartbeats", heartbeats, "--lifetime", "4", "--join", self._join, *options]
        )
        self._routers.append(router)
        self._heartbeats.append(heartbeats)
        return router.url

    def add_silent_router(self, options: list[str]) -> str:
        """Start a router that is told of nothing but the instances that there are now; return its address."""
        router = RouterProcess(["--heartbeats", "", *options, *(self._as_options())])
        self._routers.append(router)
        return router.url

    def _as_options(self) -> list[str]:
        return [f"--{self._roles[name].value}={url},id={name}" for name, url in self.urls.items()]

    def start(self, role: Role, name: str) -> None:
        """Start an instance without waiting for it."""
        command = [sys.executable, "-m", "demo.xpyd.server", "--role", role.value, "--node-id", name]
        command += ["--join", self._join, *self._instance_options]
        command += [f"--router={heartbeats}" for heartbeats in self._heartbeats]
        self._roles[name] = role
        self.instances[name] = Process(name, command)

    def wait(self, *names: str) -> None:
        """Wait until these instances are up and the router knows them."""
        for name in names:
            self.urls[name] = json.loads(self.instances[name].first_line())["url"]
        self._routers[0].wait(*names)

    def known(self) -> list[dict[str, Any]]:
        """Return what the router knows of each instance."""
        return self._routers[0].known()

    def drain(self, name: str) -> None:
        """Have the router send it nothing new."""
        request = urllib.request.Request(f"{self.url}/instances/{name}/drain", method="POST")  # noqa: S310
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - the router's own
            response.read()

    def metrics(self) -> dict[str, float]:
        """Return the router's counters by name and labels."""
        return self._routers[0].metrics()

    def stats(self, name: str) -> dict[str, int]:
        """Return an instance's own counters; empty if it is gone."""
        try:
            found: dict[str, int] = json.loads(get(f"{self.urls[name]}/stats"))
        except OSError:
            return {}
        return found

    def close(self) -> None:
        """End all processes."""
        for process in [*self.instances.values(), *self._routers]:
            process.stop()
        for process in [*self.instances.values(), *self._routers]:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None:
            for process in [*self.instances.values(), *self._routers]:
                process.kill()
        self.close()


def get(url: str) -> bytes:
    """Fetch a page."""
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 - the router's own
        page: bytes = response.read()
        return page


def samples(url: str) -> dict[str, float]:
    """Fetch a page of metrics; return the samples by name and labels."""
    lines = get(url).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
