"""The limit of a tenant's calls: who comes beyond it waits, and misses at his deadline."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node, UsageError
from p2pkv.cache.call_limit import CallLimit
from tenancy import Secrets, settings

N, NBYTES = 8, 4096


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.close()


def test_who_comes_beyond_the_limit_waits_or_misses(secret: Secrets, nodes: list[Node]) -> None:
    given = settings(secret, "acme")
    given["tenants"]["acme"]["requests"] = 1
    nodes.append(Node.start(Config(**given)))
    node, rows = nodes[0].tenant("acme"), np.zeros((N, NBYTES), np.uint8)
    node.register_memory(rows)
    keys = [f"page-{i}" for i in range(N)]
    assert node.publish(keys, rows).all()
    limit = node._limit
    assert limit is not None
    with limit.entered(time.monotonic() + 1.0) as is_in:
        assert is_in
        began = time.monotonic()
        for outcomes in (
            node.fetch(keys, rows, timeout=0.2),
            node.exists(keys, timeout=0.2),
            node.publish(["other"], rows[:1], timeout=0.2),
            node.whereabouts(keys, timeout=0.2).outcomes,
        ):
            assert not outcomes.any()
        assert time.monotonic() - began >= 0.8
        assert node.counters()["p2pkv_limited_calls_total"] == 4
        assert nodes[0].counters()['p2pkv_tenant_limited_calls_total{tenant="acme"}'] == 4
        with pytest.raises(UsageError, match="the batch is empty"):
            node.exists([], timeout=0.2)
        assert node.retract(keys[:1]).all(), "what gives room back is not kept waiting"
        waiting: list[Any] = []
        thread = threading.Thread(target=lambda: waiting.append(node.exists(keys[1:], timeout=60.0)))
        thread.start()
        eventually(lambda: limit.n_waiting == 1, 60.0)
        began = time.monotonic()
    thread.join()
    assert waiting[0].all(), "it came in when the other call had ended"
    assert time.monotonic() - began < 30.0, "and not at its deadline"


def test_what_waits_while_the_namespace_is_bumped_is_not_published_after_it(
    secret: Secrets, nodes: list[Node]
) -> None:
    given = settings(secret, "acme")
    given["tenants"]["acme"]["requests"] = 1
    nodes.append(Node.start(Config(**given)))
    node, rows = nodes[0].tenant("acme"), np.zeros((1, NBYTES), np.uint8)
    node.register_memory(rows)
    limit = node._limit
    assert limit is not None
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(node.publish(["page"], rows, timeout=60.0)))
    with limit.entered(time.monotonic() + 1.0):
        thread.start()
        eventually(lambda: limit.n_waiting == 1, 60.0)
        nodes[0].bump("acme")
    thread.join()
    assert not outcomes[0].any()
    assert not node.exists(["page"]).any(), "its bytes are those of before the bump"


def test_who_came_first_goes_in_first() -> None:
    limit, order, threads = CallLimit(1), list[int](), list[threading.Thread]()

    def call(number: int) -> None:
        with limit.entered(time.monotonic() + 60.0) as is_in:
            assert is_in
            order.append(number)

    with limit.entered(time.monotonic()):
        for number in range(5):
            threads.append(threading.Thread(target=call, args=(number,)))
            threads[-1].start()
            eventually(lambda n=number: limit.n_waiting == n + 1, 60.0)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_a_signal_s_handler_interrupts_who_waits() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    limit, before = CallLimit(1), signal.signal(signal.SIGALRM, interrupt)
    try:
        with limit.entered(time.monotonic()):
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Interrupted):
                limit.entered(began + 3600.0)
            assert time.monotonic() - began < 60.0
        assert limit.n_waiting == limit.n_refused == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    with limit.entered(time.monotonic()) as is_in:
        assert is_in, "its place was not lost"


def test_a_node_that_is_closed_lets_nobody_wait() -> None:
    limit = CallLimit(1)
    seen: list[bool] = []

    def wait() -> None:
        with limit.entered(time.monotonic() + 3600.0) as is_in:
            seen.append(is_in)

    with limit.entered(time.monotonic()) as is_in:
        assert is_in
        thread = threading.Thread(target=wait)
        thread.start()
        limit.close()
        thread.join()
    assert seen == [False]


class _Interrupted(Exception):
    pass


def test_no_place_is_lost_to_an_exception_that_comes_at_any_moment() -> None:
    limit, is_over, main = CallLimit(2), threading.Event(), threading.get_ident()

    def call() -> None:
        for _ in range(1000):
            with limit.entered(time.monotonic() + 5.0) as is_in:
                assert is_in

    def interrupt() -> None:
        chance = random.Random(7)
        while not is_over.is_set():
            time.sleep(chance.uniform(0, 0.0005))  # the random moments are the test
            signal.pthread_kill(main, signal.SIGUSR1)

    def raise_within_call(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is call.__code__:
                raise _Interrupted
            frame = frame.f_back

    n_interrupted, thread = 0, threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGUSR1, raise_within_call)
    try:
        thread.start()
        while n_interrupted < 2000 and not limit.n_refused:
            try:
                call()
            except _Interrupted:
                n_interrupted += 1
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    with limit.entered(time.monotonic()) as first, limit.entered(time.monotonic()) as second:
        assert first
        assert second
    assert limit.n_refused == 0


def test_never_more_are_in_than_the_limit_says() -> None:
    limit, lock, now, most = CallLimit(3), threading.Lock(), [0], [0]

    def call() -> None:
        for _ in range(200):
            with limit.entered(time.monotonic() + 60.0) as is_in:
                assert is_in
                with lock:
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                with lock:
                    now[0] -= 1

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most[0] <= 3
    assert limit.n_refused == 0
