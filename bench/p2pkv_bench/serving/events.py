"""What a streamed event costs who passes it on: the router, and other proxies in turns, before one ticking engine.

Processor time is counted, not events a second: engine and clients need the same cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2pkv_bench.errors import BenchError
from p2pkv_bench.serving.beside import nginx, sglang_router, why_no_nginx
from p2pkv_bench.serving.overhead import process, router

_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    n_streams: int
    n_events: int
    rounds: int
    nginx: str
    sglang_python: str | None
    workers: int = 1
    tell: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one proxy: microseconds of a core for each event, a value a round."""

    name: str
    microseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.microseconds)

    @property
    def events_a_core(self) -> float:
        """Events that one core passes on in a second."""
        return 1e6 / self.median


def measure(plan: Plan) -> tuple[list[Cost], list[str]]:
    """Run every round on every proxy; return their costs, and why others are not among them."""
    with ExitStack() as undo:
        engine = undo.enter_context(process([sys.executable, "-m", "p2pkv_bench.serving.ticking"])).line
        proxies = [(name, *found) for name, found in _ours(undo, engine, plan.workers)]
        left_out = []
        if (why := why_no_nginx(plan.nginx)) is None:
            proxies.append(("nginx", *undo.enter_context(nginx(plan.nginx, engine))))
        else:
            left_out.append(f"nginx: {why}")
        if plan.sglang_python is not None:
            found = undo.enter_context(sglang_router(plan.sglang_python, engine))
            proxies.append(("sglang-router", *found))
        else:
            left_out.append("sglang-router: no environment was named that has it (--sglang-python)")
        spent: dict[str, list[float]] = {name: [] for name, _, _ in proxies}
        for number in range(plan.rounds):
            turn = number % len(proxies)
            for name, url, pid in (*proxies[turn:], *proxies[:turn]):
                plan.tell(f"round {number + 1} of {plan.rounds}, {name}")
                before = _seconds_of(pid)
                n_events = asyncio.run(asyncio.wait_for(_drive(url, plan), _ANSWER_S))
                spent[name].append((_seconds_of(pid) - before) / n_events * 1e6)
    return [Cost(name, tuple(values)) for name, values in spent.items()], left_out


def _ours(undo: ExitStack, engine: str, workers: int) -> Iterator[tuple[str, tuple[str, int]]]:
    yield "router", undo.enter_context(router(["--both", engine]))
    if workers > 1:
        more = ["--both", engine, "--workers", str(workers)]
        yield f"router, {workers} workers", undo.enter_context(router(more))


async def _drive(url: str, plan: Plan) -> int:
    """Have all streams at once, begun one after another over the time between two events; return the events."""
    return sum(await asyncio.gather(*(_stream(url, plan, i) for i in range(plan.n_streams))))


async def _stream(url: str, plan: Plan, number: int) -> int:
    host, _, port = url.removeprefix("http://").partition(":")
    await asyncio.sleep(number * 0.02 / plan.n_streams)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps(
            {"model": "m", "prompt": f"stream {number}", "max_tokens": plan.n_events, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        n_events, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                break
            n_events += (tail[-6:] + data).count(b'data: {"id"') - tail[-6:].count(b'data: {"id"')
            tail = (tail + data)[-64:]
        if b"data: [DONE]" not in tail:
            raise BenchError(f"a stream through {url} ended with {tail!r}")
        return n_events
    finally:
        writer.close()


def _seconds_of(pid: int) -> float:
    """Return the processor time of a process, its threads and its children."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
        for child in (task / "children").read_text().split():
            total += _seconds_of(int(child))
    return total


def show(console: Console, costs: list[Cost], left_out: list[str]) -> None:
    """Print them; the first is what the others are compared with."""
    table = Table("", title="passing on a streamed event", title_justify="left")
    for column in ("us of a core, median", "lowest", "highest", "events/s a core", "of the router's"):
        table.add_column(column, justify="right")
    for one in costs:
        spread = f"{min(one.microseconds):.1f}", f"{max(one.microseconds):.1f}"
        share = one.events_a_core / costs[0].events_a_core
        table.add_row(one.name, f"{one.median:.1f}", *spread, f"{one.events_a_core:,.0f}", f"{share:.2f}x")
    console.print(table)
    for why in left_out:
        console.print(f"left out: {why}", markup=False)
