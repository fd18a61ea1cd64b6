"""What a scrape of a node's metrics costs, and how long another thread waits for the interpreter meanwhile."""

from __future__ import annotations

import select
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial

from p2pkv.config import Config
from p2pkv.exposition import Exposition
from p2pkv.node import Node
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, Target, make_row

_AT_MOST_MS = 2.0
_HELD_AT_MOST_MS = 0.2
_A_ROUND = 20
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Scrape a node: the text alone, over HTTP, and what a thread that wants the interpreter waits for it meanwhile."""
    plan.tell("scrape")
    made, over_http, held, undisturbed = [], [], [], []
    with Node.start(Config(node_id="scraped", pool_size="16MiB", buffer_size=0, metrics_port=0)) as node:
        exposition = Exposition(node.metrics)
        for _ in range(plan.rounds):
            made.append(_each_ms(lambda: exposition.write(_OPENMETRICS)))
            over_http.append(_each_ms(lambda: _get(node)))
            wait_ms, lasted_s = _longest_wait(lambda: exposition.write(_OPENMETRICS))
            held.append(wait_ms)
            undisturbed.append(_longest_wait(partial(time.sleep, lasted_s))[0])
    yield make_row(
        {"p2pkv": made}, suite="scrape", case="the text", unit="ms", target=Target(_AT_MOST_MS, at_most=True)
    )
    yield make_row({"p2pkv": over_http}, suite="scrape", case="over HTTP", unit="ms")
    yield make_row(
        {"p2pkv": held},
        suite="scrape",
        case="longest wait for the interpreter, median of scrapes",
        unit="ms",
        target=Target(_HELD_AT_MOST_MS, at_most=True),
    )
    # what the machine itself makes a thread wait, in as long a time: no scrape can be below it
    yield make_row(
        {"p2pkv": undisturbed}, suite="scrape", case="the same while nothing is scraped", unit="ms"
    )


def _each_ms(call: Callable[[], object]) -> float:
    took = []
    for _ in range(_A_ROUND):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return sorted(took)[_A_ROUND // 2] * 1e3


def _get(node: Node) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{node.metrics_port}/metrics", headers={"Accept": _OPENMETRICS}
    )
    with urllib.request.urlopen(request, timeout=10) as page:  # noqa: S310  # the node's own
        body: bytes = page.read()
    return body


def _longest_wait(call: Callable[[], object]) -> tuple[float, float]:
    """Return two medians over calls.

    They are of the longest time, in ms, in which a thread that gives way is not served, and of the seconds that a call
    takes.
    """
    is_over = threading.Event()
    longest: list[float] = []
    began = threading.Event()
    nothing = select.poll()

    def wait_for_it() -> None:
        began.set()
        while not is_over.is_set():
            before = time.perf_counter()
            # This lets the interpreter go and takes it back; a sleep of no time would add the kernel's 50 us.
            nothing.poll(0)
            longest.append(time.perf_counter() - before)

    waits, lasted = [], []
    for _ in range(_A_ROUND):
        longest.clear()
        is_over.clear()
        began.clear()
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        began.wait()
        since = time.perf_counter()
        call()
        lasted.append(time.perf_counter() - since)
        is_over.set()
        thread.join()
        waits.append(max(longest))
    return sorted(waits)[_A_ROUND // 2] * 1e3, sorted(lasted)[_A_ROUND // 2]
