"""What a router adds: engines that answer at once, straight and through routers, each in a process of its own."""

from __future__ import annotations

import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from p2pkv_bench.errors import BenchError
from p2pkv_bench.serving.client import Target

_START_S = 60.0
_END_S = 10.0


@contextmanager
def targets() -> Iterator[tuple[Target, ...]]:
    """Run an engine and two routers: one that passes requests on, one that has a prefill do its part first."""
    with ExitStack() as undo:
        engine = undo.enter_context(process([sys.executable, "-m", "p2pkv_bench.serving.instant"])).line
        alone, _ = undo.enter_context(router(["--both", engine]))
        paired, _ = undo.enter_context(router(["--prefill", f"{engine},id=prefill", "--decode", engine]))
        urls = {"straight": engine, "router": alone, "router, with a prefill": paired}
        yield tuple(Target(name, (url,)) for name, url in urls.items())


@dataclass(frozen=True, slots=True)
class Running:
    """A process, and the line that it said when it was up."""

    line: str
    pid: int


@contextmanager
def router(options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run the router for the block; give its URL and process id when it can serve."""
    command = [sys.executable, "-c", "from p2pkv_proxy.cli import main; main()"]
    command += ["--listen", "127.0.0.1:0", "--heartbeats", "", *options]
    with process(command) as running:
        url = running.line.split("on ")[1].split(",")[0]
        deadline = time.monotonic() + _START_S
        while not _is_ready(url):
            if time.monotonic() > deadline:
                raise BenchError("the router does not find the engine that answers at once")
            time.sleep(0.05)
        yield url, running.pid


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2) as page:  # noqa: S310 - our own
            return b"true" in bytes(page.read())
    except urllib.error.HTTPError as error:
        error.close()
        return False


@contextmanager
def process(command: Sequence[str]) -> Iterator[Running]:
    """Run a process for the block."""
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert started.stdout is not None
        is_there, _, _ = select.select([started.stdout], [], [], _START_S)
        line = started.stdout.readline().decode().strip() if is_there else ""
        if not line:
            raise BenchError(f"{' '.join(command[:4])} did not start")
        yield Running(line, started.pid)
    finally:
        started.terminate()
        try:
            started.wait(_END_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        for stream in (started.stdin, started.stdout):
            if stream is not None:
                stream.close()
