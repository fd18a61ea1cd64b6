"""Workers that serve one port: they agree on who is there and what it has to do, and are replaced when they die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from p2pkv.control.secret import cluster_keys
from p2pkv.instances.heartbeat import Heart, Instance, Load, Mode, Role, State, checked
from p2pkv_proxy.crew import added
from p2pkv_proxy.metrics import merged
from p2pkv_proxy.registry import Registry
from patience import PATIENCE

KEY = "sk-ours-0123456789"
ENGINE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Role
async def main():
    async with FakeEngine(Role.BOTH) as engine:
        print(engine.instance.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run Python for the block; give the process, and the line that it says first."""
    started = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        yield started, started.stdout.readline()
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def engine() -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return process("-c", ENGINE, json.dumps(sys.path))


@contextmanager
def router(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a router of two workers; give its process and URL."""
    command = [
        "-c",
        "from p2pkv_proxy.cli import main; main()",
        "--listen",
        "127.0.0.1:0",
        "--heartbeats",
        "",
    ]
    with process(*command, "--workers", "2", *options) as (started, line):
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield started, found[0]
        started.terminate()
        assert started.wait(20 * PATIENCE) == 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10 * PATIENCE) as page:  # noqa: S310 - our own
        text: str = page.read().decode()
        return text


def complete(url: str) -> str:
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", body, headers)  # noqa: S310 - our own
    with urllib.request.urlopen(request, timeout=20 * PATIENCE) as page:  # noqa: S310 - our own
        text: str = json.load(page)["choices"][0]["text"]
        return text


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20 * PATIENCE
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the workers: other children have no port of theirs."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in command_of(child)]


def command_of(pid: int) -> bytes:
    """Return the command line of a process, nothing of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_ready(url: str) -> bool:
    """Whether ten connections, which both workers have some of, find the engine."""
    return all("ready" in get(url + "/instances") for _ in range(10))


def test_workers_serve_one_port_and_tell_of_each_other() -> None:
    with engine() as (_, engine_url), router("--both", engine_url.strip()) as (_, url):
        until(lambda: is_ready(url))
        assert len({complete(url) for _ in range(20)}) == 1
        served = re.search(r'p2pkv_proxy_requests_total{outcome="ok"} (\S+)', get(url + "/metrics"))
        assert served is not None
        assert float(served[1]) == 20


def test_a_worker_that_dies_is_replaced() -> None:
    with engine() as (_, engine_url), router("--both", engine_url.strip()) as (started, url):
        until(lambda: is_ready(url))
        before = children(started.pid)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(children(started.pid)) - set(before)) == 1)
        until(lambda: len(children(started.pid)) == 2 and is_ready(url))
        complete(url)


def test_a_worker_that_stands_still_is_replaced() -> None:
    with engine() as (_, engine_url), router("--both", engine_url.strip()) as (started, url):
        until(lambda: is_ready(url))
        before = children(started.pid)
        os.kill(before[0], signal.SIGSTOP)
        until(lambda: before[0] not in children(started.pid))
        until(lambda: len(children(started.pid)) == 2 and is_ready(url))
        complete(url)


def test_what_one_worker_is_told_of_an_instance_all_know() -> None:
    with engine() as (_, engine_url), router("--both", engine_url.strip()) as (_, url):
        until(lambda: is_ready(url))
        name = json.loads(get(url + "/instances"))[0]["id"]
        drain = f"{url}/instances/{name}/drain"
        request = urllib.request.Request(drain, b"", method="POST")  # noqa: S310 - our own
        urllib.request.urlopen(request, timeout=10 * PATIENCE).close()  # noqa: S310 - our own
        until(lambda: all("draining" in get(url + "/instances") for _ in range(10)))


def test_workers_end_with_their_parent() -> None:
    with engine() as (_, engine_url):
        command = ["-c", "from p2pkv_proxy.cli import main; main()", "--listen", "127.0.0.1:0"]
        command += ["--heartbeats", "", "--workers", "2", "--both", engine_url.strip()]
        with process(*command) as (started, _):
            workers = children(started.pid)
            assert len(workers) == 2
            started.kill()
            started.wait()
            until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_loads_are_added_up() -> None:
    assert added([{"a": (1, 10), "b": (2, 20)}, {"a": (3, 30)}]) == {"a": (4, 40), "b": (2, 20)}
    assert added([]) == {}


def test_metrics_of_workers_are_added_up_unless_all_count_the_same() -> None:
    page = (
        "# HELP p2pkv_proxy_x_total X\n# TYPE p2pkv_proxy_x_total counter\n"
        'p2pkv_proxy_x_total{{a="b c"}} {}\n'
        "# HELP p2pkv_proxy_instance_ready R\n# TYPE p2pkv_proxy_instance_ready gauge\n"
        'p2pkv_proxy_instance_ready{{instance="i"}} 1.0\n'
    )
    assert merged([page.format(1.0), page.format(2.5)]) == page.format(3.5)
    assert merged([page.format(1.0)]) == page.format(1.0)


def test_what_others_have_under_way_weighs() -> None:
    registry = Registry()
    instance = checked(Instance(url="http://127.0.0.1:1", role=Role.BOTH, mode=Mode.VLLM, capacity=3))
    registry.list_instance(instance)
    (tracked,) = registry
    tracked.begin(100, 0.0, lambda: None)
    registry.note_elsewhere({tracked.id: (2, 700)})
    assert (tracked.in_flight, tracked.busy, tracked.weight) == (1, 3, 800)
    assert tracked.is_full()
    registry.note_elsewhere({})
    assert (tracked.busy, tracked.weight) == (1, 100)


def test_whoever_sends_heartbeats_is_known_to_all_workers_and_to_those_that_come_later(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    command = [
        "-c",
        "from p2pkv_proxy.cli import main; main()",
        "--listen",
        "127.0.0.1:0",
        "--lifetime",
        "600",
    ]
    command += ["--heartbeats", "127.0.0.1:0", "--secret-file", str(secret), "--workers", "2"]
    with engine() as (_, engine_url), process(*command) as (started, line):
        found = re.search(r"on (http://\S+), heartbeats on (\S+)", line)
        assert found is not None, line
        url = found[1]
        instance = checked(Instance(url=engine_url.strip(), role=Role.BOTH, mode=Mode.VLLM))
        keys = cluster_keys(str(secret))
        heart = Heart(instance, [found[2]], keys, lambda: Load(State.READY), interval=3600.0)
        try:
            until(lambda: is_ready(url))
            before = children(started.pid)
            os.kill(before[0], signal.SIGKILL)
            until(lambda: len(set(children(started.pid)) - set(before)) == 1)
            until(lambda: is_ready(url))
        finally:
            heart.close()
        until(lambda: not any("ready" in get(url + "/instances") for _ in range(10)))
        started.terminate()
        assert started.wait(20 * PATIENCE) == 0


def test_files_are_read_again_at_sighup_and_a_new_worker_goes_by_what_is_in_force(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").replace(keys)

    def statuses(url: str) -> set[int]:
        """Of connections that both workers have some of."""
        found = set()
        for _ in range(10):
            request = urllib.request.Request(url + "/instances", headers={"authorization": f"Bearer {KEY}"})  # noqa: S310 - our own
            try:
                with urllib.request.urlopen(request, timeout=10 * PATIENCE) as page:  # noqa: S310 - our own
                    found.add(page.status)
            except urllib.error.HTTPError as error:
                found.add(error.code)
        return found

    write("sk-another-0123456789\n")
    with router("--both", "http://127.0.0.1:9", "--api-keys", str(keys)) as (started, url):
        assert statuses(url) == {401}
        write(f"ours {KEY}\n")
        started.send_signal(signal.SIGHUP)
        until(lambda: statuses(url) == {200})
        write("broken")
        started.send_signal(signal.SIGHUP)
        before = children(started.pid)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(children(started.pid)) - set(before)) == 1)
        until(lambda: statuses(url) == {200})
        keys.unlink()
        until(lambda: statuses(url) == {200})


@pytest.mark.parametrize("n_workers", ["1", "2"])
def test_a_hang_up_ends_nothing(n_workers: str) -> None:
    command = [
        "-c",
        "from p2pkv_proxy.cli import main; main()",
        "--listen",
        "127.0.0.1:0",
        "--heartbeats",
        "",
    ]
    with process(*command, "--workers", n_workers, "--both", "http://127.0.0.1:9") as (started, line):
        found = re.search(r"http://\S+", line)
        assert found is not None
        for _ in range(3):
            started.send_signal(signal.SIGHUP)
            assert "127.0.0.1:9" in get(found[0] + "/instances")
        started.terminate()
        assert started.wait(20 * PATIENCE) in (0, -signal.SIGTERM)  # which uvicorn hands on when all is done
