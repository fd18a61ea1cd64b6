"""The router before demo engines, all of them processes: instances die, come and go under load."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.xpyd.load import Asked, Reference, Tally, drive, mixed
from demo.xpyd.processes import Cluster
from p2pkv.instances.heartbeat import Role
from patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FIRST = {
    "prefill-0": Role.PREFILL,
    "prefill-1": Role.PREFILL,
    "decode-0": Role.DECODE,
    "decode-1": Role.DECODE,
}


@pytest.fixture
def served() -> Iterator[Cluster]:
    with Cluster(["--policy", "cache_aware"]) as cluster:
        for name, role in FIRST.items():
            cluster.start(role, name)
        cluster.wait(*FIRST)
        yield cluster


def streams(n: int) -> list[Asked]:
    return [Asked(asked.prompt, asked.n_new, True, asked.is_chat) for asked in mixed(n, seed=7)]


def check(tally: Tally, n: int) -> None:
    """No hang, no wrong token, and errors only where tokens had arrived."""
    reference = Reference()
    assert len(tally.answered) == n
    for one in tally.answered:
        right = reference.text(one.asked)
        if one.error:
            assert one.has_tokens, one.error
            assert right.startswith(one.text), (one.text, right)
        else:
            assert one.text == right


def drive_and(
    cluster: Cluster, load: list[Asked], when: int, act: object, per_second: float, **fields: object
) -> Tally:
    """Drive the load; do something once so many have been answered. ``fields`` go into all bodies."""
    assert callable(act)
    tally = Tally()

    async def both() -> None:
        driving = asyncio.ensure_future(
            drive(cluster.url, load, tally, per_second, fields=lambda asked: fields)
        )
        while len(tally.answered) < when and not driving.done():
            await asyncio.sleep(0.005)
        await asyncio.to_thread(act)
        await driving

    asyncio.run(both())
    return tally


def test_a_prefill_killed_under_200_streams_costs_no_answer(served: Cluster) -> None:
    """All 200 are sent within a second, so that most are under way when it dies."""
    load = streams(200)
    tally = drive_and(served, load, 20, served.instances["prefill-1"].kill, per_second=400.0)
    check(tally, 200)
    assert not [one for one in tally.answered if one.error]  # its pages are recomputed


def test_a_decode_killed_under_200_streams_breaks_off_only_what_had_begun(served: Cluster) -> None:
    load = streams(200)
    tally = drive_and(served, load, 20, served.instances["decode-1"].kill, per_second=400.0)
    check(tally, 200)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_greedy_streams_of_a_killed_decode_go_on_at_the_other(served: Cluster, seed: int) -> None:
    """Prompts' pages come from the pool; whatever token a stream was at, its text is that of one process alone."""
    load = [Asked(asked.prompt, 200, True, asked.is_chat) for asked in mixed(20, seed=seed)]
    labels = '{instance="decode-1",role="decode"}'

    def kill_when_streams_have_begun() -> None:
        deadline = time.monotonic() + 60 * PATIENCE
        found = {"requests": 0.0, "waiting_requests": 0.0}
        while found["requests"] <= found["waiting_requests"]:
            assert time.monotonic() < deadline
            known = served.metrics()
            found = {name: known[f"p2pkv_proxy_instance_{name}{labels}"] for name in found}
        served.instances["decode-1"].kill()

    tally = drive_and(served, load, 0, kill_when_streams_have_begun, per_second=40.0, temperature=0)
    check(tally, 20)
    assert not [one for one in tally.answered if one.error]
    assert served.metrics()['p2pkv_proxy_resumed_streams_total{outcome="resumed"}'] > 0


def test_instances_that_come_and_go_under_load_lose_nothing(served: Cluster) -> None:
    def come_and_go() -> None:
        served.start(Role.DECODE, "decode-2")
        served.start(Role.PREFILL, "prefill-2")
        served.wait("decode-2", "prefill-2")
        for name in ("decode-0", "prefill-0"):
            served.drain(name)
        deadline = time.monotonic() + 60 * PATIENCE
        while any(one["in_flight"] for one in served.known() if one["id"] in ("decode-0", "prefill-0")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for name in ("decode-0", "prefill-0"):
            served.instances[name].stop()

    tally = drive_and(served, mixed(400, seed=3), 20, come_and_go, per_second=25.0)
    check(tally, 400)
    assert not [one for one in tally.answered if one.error]
    assert {"decode-2", "prefill-2"} <= {one["id"] for one in served.known() if one["served"]}


def test_a_stopped_prefill_is_noticed_and_passed_over(served: Cluster) -> None:
    """SIGSTOP: it accepts connections and says nothing; its heartbeats end, and its requests go elsewhere."""
    load = streams(60)
    tally = drive_and(served, load, 5, served.instances["prefill-1"].pause, per_second=60.0)
    check(tally, 60)
    assert not [one for one in tally.answered if one.error]
    assert max(one.seconds for one in tally.answered) < 60


def test_the_overhead_of_the_router_can_be_measured() -> None:
    """The figures are the machine's; that every request was answered through every way is not."""
    command = [
        sys.executable,
        "-c",
        "from p2pkv.cli import main; main()",
        "bench",
        "serving",
        "--overhead",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--requests", "20", "--rounds", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["target"] for one in found] == ["straight", "router", "router, with a prefill"]
    assert all(one["n_errors"] == 0 and one["n_requests"] == 20 for one in found)
    assert all(one["overhead"]["mean"] > 0 for one in found[1:])


def test_the_demo_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.xpyd", "--requests", "60"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode-2 is added" in done.stdout
    assert "prefill-1 is killed" in done.stdout
    assert "60 outputs equal to one process alone" in done.stdout
