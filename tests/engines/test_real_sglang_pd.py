"""A real prefill and a real decode server hand KV over through p2pkv: ``make test-sglang-pd``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from sglang_pair import Pair, Refused, failures
from sglang_server import SGLangServer

from cluster import eventually
from heartbeats import Listener
from p2pkv.instances.heartbeat import Mode, Role, State

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

N_REQUESTS = 100
N_AROUND_A_FAILURE = 50
N_AT_ONCE = 10
N_TOKENS = 8
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 500, 1025)
"""Around a page (16) and a chunk of prefill (128), and up to several chunks."""
DEADLINE_S = 60.0
"""For any request. Membership takes 3 s to be sure that prefill is gone; SGLang asks 15 times, a second apart, where
a prefill server is before it gives up; and all of it may share its cores with everything else."""
BACK_S = 60.0

ROWS_OF_A_PAGE = 8
"""K and V of the tiny model's layers."""

Answers = dict[int, list[int]]


@pytest.fixture(scope="module")
def router() -> Iterator[Listener]:
    """Return what both servers announce themselves to."""
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, router: Listener) -> Iterator[Pair]:
    """Return a prefill and a decode server, up."""
    pair = Pair(tmp_path_factory.mktemp("pd"), router.address)
    try:
        pair.prefill.wait_until_ready()
        pair.decode.wait_until_ready()
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return what a single server answers to the prompts of all tests."""
    server = SGLangServer(tmp_path_factory.mktemp("single") / "single.log")
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(N_AT_ONCE) as pool:
            ids = pool.map(lambda n: server.generate(prompt(n), N_TOKENS)["output_ids"], range(N_REQUESTS))
        return {n: list(output) for n, output in enumerate(ids)}
    finally:
        server.kill()


def prompt(n: int) -> list[int]:
    """Return prompt number ``n``; no two begin alike."""
    random = Random(n)
    length = LENGTHS[n] if n < len(LENGTHS) else random.randrange(2, 600)
    return [300 + n, *(random.randrange(300, 4000) for _ in range(length - 1))]


def n_pages(numbers: range) -> int:
    """Return the pages of these prompts."""
    return sum(-(-len(prompt(n)) // 16) for n in numbers)


def answer(pair: Pair, n: int) -> list[int] | None:
    """Return the answer to prompt ``n``, or None if there was an error instead; one or the other by the deadline."""
    try:
        return list(pair.generate(prompt(n), N_TOKENS, timeout=DEADLINE_S)["output_ids"])
    except Refused:
        return None


def test_prefill_and_decode_give_a_single_servers_answers(pair: Pair, right: Answers) -> None:
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        given = list(pool.map(lambda n: answer(pair, n), range(N_REQUESTS)))
    assert dict(enumerate(given)) == right
    assert len({tuple(ids) for ids in right.values()}) > N_REQUESTS // 2, "alike answers would hide wrong KV"

    # an equal answer proves little: SGLang and p2pkv must both say that the KV came from prefill
    told = pair.prefill.metrics()
    assert told["sglang:kv_transfer_total_mb_count"] == N_REQUESTS
    assert told.get("sglang:num_transfer_failed_reqs_total", 0) == 0
    assert pair.decode.metrics().get("sglang:num_transfer_failed_reqs_total", 0) == 0
    counters = pair.decode.counters()
    rows = counters["p2pkv_granted_rows_total"]
    assert rows >= n_pages(range(N_REQUESTS)) * ROWS_OF_A_PAGE + N_REQUESTS
    assert rows == pair.prefill.counters()["p2pkv_taken_rows_total"]
    assert failures(pair.prefill) == failures(pair.decode) == {}


def test_both_servers_announce_themselves(pair: Pair, router: Listener) -> None:
    for role, server in ((Role.PREFILL, pair.prefill), (Role.DECODE, pair.decode)):
        heartbeat = router.hear(
            lambda heard, role=role: heard.instance.role is role and heard.state is State.READY
        )  # type: ignore[misc]
        told = heartbeat.instance
        assert (told.url, told.mode) == (f"http://127.0.0.1:{server.port}", Mode.SGLANG)
        assert told.bootstrap_port == (pair.bootstrap_port if role is Role.PREFILL else None)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_prefill_that_fails_costs_its_requests_only(pair: Pair, right: Answers, how: str) -> None:
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        asked = [pool.submit(answer, pair, n) for n in range(N_AROUND_A_FAILURE)]
        eventually(lambda: sum(one.done() for one in asked) >= N_AROUND_A_FAILURE // 3, DEADLINE_S)
        if how == "stopped":
            pair.prefill.stop()
        else:
            pair.prefill.kill()
        given = [one.result() for one in asked]  # one without an answer in time raises here

    # the answers there are, are right, and those before the failure are there
    assert all(ids is None or ids == right[n] for n, ids in enumerate(given))
    assert sum(ids is not None for ids in given) >= N_AROUND_A_FAILURE // 3
    assert any(ids is None for ids in given), "the failure came too late to harm anything"
    if how == "stopped":
        pair.prefill.resume()
    else:
        pair.start_prefill()
        pair.prefill.wait_until_ready()

    # and prefill is used again as soon as it is back
    eventually(lambda: answer(pair, 0) == right[0], BACK_S)
    assert [answer(pair, n) for n in range(12)] == [right[n] for n in range(12)]
    assert not any(name.startswith("p2pkv_failed_calls") for name in failures(pair.decode))
