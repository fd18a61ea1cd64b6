"""``make demo-xpyd``: a router, two prefills and two decodes under a mixed load, while one comes and one is killed.

Exits with 0 only if every output is what one process alone generates, and no request failed that had no token yet.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.xpyd.load import Answered, Asked, Reference, Tally, drive, mixed
from demo.xpyd.processes import Cluster, StartError
from p2pkv.heartbeat import Role

FIRST = {
    "prefill-0": Role.PREFILL,
    "prefill-1": Role.PREFILL,
    "decode-0": Role.DECODE,
    "decode-1": Role.DECODE,
}
ADDED = "decode-2"
KILLED = "prefill-1"
_PER_SECOND = 25.0
_LOOK_S = 0.5


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.xpyd", description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--rate", type=float, default=_PER_SECOND, help="requests a second")
    options = parser.parse_args()
    console = Console(highlight=False)
    try:
        return run(console, options.requests, options.policy, options.rate)
    except StartError as error:
        console.print(Text(str(error), style="bold red"), soft_wrap=True)
        return 1


def run(console: Console, n_requests: int, policy: str, rate: float) -> int:
    """Start everything, drive the load, judge it."""
    load = mixed(n_requests, seed=1)
    began = time.monotonic()
    with Cluster(["--policy", policy]) as cluster:
        with console.status("a router, two prefills and two decodes start"):
            for name, role in FIRST.items():
                cluster.start(role, name)
            cluster.wait(*FIRST)
        console.print(f"the router serves {cluster.url}; {n_requests} requests, {rate:g} a second")
        show = _Show(cluster)
        tally = Tally()
        with Live(show.table(tally), console=console, refresh_per_second=4) as live:
            asyncio.run(_scenario(cluster, load, tally, rate, show, live))
            live.update(show.table(tally))
        counted = cluster.metrics()
    with console.status("one process alone generates the same"):
        reference = Reference()
        wrong = [one for one in tally.answered if not one.error and one.text != reference.text(one.asked)]
        wrong += [
            one for one in tally.answered if one.error and not reference.text(one.asked).startswith(one.text)
        ]
    return _judge(console, tally, wrong, counted, time.monotonic() - began)


async def _scenario(
    cluster: Cluster, load: list[Asked], tally: Tally, rate: float, show: _Show, live: Live
) -> None:
    """Drive the load; add a decode after a third of it, kill a prefill after two thirds."""
    driving = asyncio.ensure_future(drive(cluster.url, load, tally, rate))
    try:
        while not driving.done():
            if ADDED not in cluster.instances and tally.n_sent > len(load) / 3:
                cluster.start(Role.DECODE, ADDED)
                show.note(f"{ADDED} is added")
            if show.killed == "" and tally.n_sent > 2 * len(load) / 3:
                cluster.instances[KILLED].kill()
                show.killed = KILLED
                show.note(f"{KILLED} is killed")
            await asyncio.wait({driving}, timeout=_LOOK_S)
            live.update(await asyncio.to_thread(show.table, tally))
        driving.result()
    finally:
        driving.cancel()


class _Show:
    """The live table."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._notes: list[str] = []
        self.killed = ""

    def note(self, what: str) -> None:
        self._notes.append(what)

    def table(self, tally: Tally) -> Group:
        """Return how things are now."""
        table = Table("instance", "role", "state", "breaker", title="instances", title_justify="left")
        for column in ("requests", "served", "tokens in flight"):
            table.add_column(column, justify="right")
        for one in self._cluster.known():
            table.add_row(
                one["id"],
                one["role"],
                one["state"],
                one["breaker"],
                str(one["in_flight"]),
                str(one["served"]),
                str(one["tokens"]),
            )
        n_errors = sum(bool(one.error) for one in tally.answered)
        said = f"{tally.n_sent} requests sent, {len(tally.answered)} answered, {n_errors} with an error"
        return Group(table, Text(said), *(Text(f"- {note}", style="yellow") for note in self._notes))


def _judge(
    console: Console, tally: Tally, wrong: list[Answered], counted: dict[str, float], seconds: float
) -> int:
    errors = [one for one in tally.answered if one.error]
    innocent = [one for one in errors if not one.has_tokens]
    firsts = sorted(one.first_token_seconds for one in tally.answered if not one.error)
    if firsts:
        middle, late = firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.99)]
        console.print(f"time to first token: median {middle * 1e3:.0f} ms, p99 {late * 1e3:.0f} ms")
    console.print(f"retried on another pair: {counted.get('p2pkv_proxy_retries_total', 0):.0f}")
    for name, value in sorted(counted.items()):
        if name.startswith("p2pkv_proxy_choices_total"):
            console.print(f"  chosen for {name.split(chr(34))[1]}: {value:.0f}", markup=False)
    n_right = len(tally.answered) - len(errors) - len([one for one in wrong if not one.error])
    console.print(f"[bold green]✓ {n_right} outputs equal to one process alone, token for token[/]")
    for one in errors:
        console.print(f"  broken off after {len(one.text)} tokens: {one.error}", markup=False)
    problems = [f"{len(wrong)} outputs differ from one process alone"] if wrong else []
    if innocent:
        problems.append(f"{len(innocent)} requests failed though none of their tokens had arrived")
    if len(tally.answered) != tally.n_sent:
        problems.append(f"{tally.n_sent - len(tally.answered)} requests never ended")
    for problem in problems:
        console.print(f"[bold red]✗ {problem}[/]")
    console.print(f"took {seconds:.1f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
