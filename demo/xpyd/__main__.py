"""``make demo-xpyd``: a router before prefills and decodes under a mixed load, while one comes and one is killed.

The engines are the demo's own, or real ones on a CPU: ``ENGINE=sglang`` and ``ENGINE=vllm``. Exits with 0 only if every
output is what one process alone generates, and no request failed that had no token yet.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from demo.xpyd import real
from demo.xpyd.kinds import ENGINES
from demo.xpyd.load import Asked, Reference, Tally, drive, mixed
from demo.xpyd.processes import Cluster, StartError
from demo.xpyd.show import Show, judge, show_choices
from p2pkv.instances.heartbeat import Role

FIRST = {
    "prefill-0": Role.PREFILL,
    "prefill-1": Role.PREFILL,
    "decode-0": Role.DECODE,
    "decode-1": Role.DECODE,
}
ADDED = "decode-2"
KILLED = "prefill-1"
_LOOK_S = 0.5


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.xpyd", description=__doc__)
    parser.add_argument("--engine", choices=("demo", *ENGINES), default="demo")
    parser.add_argument("--requests", type=int, help="default: 300, or 60 to real engines")
    parser.add_argument("--policy", default="cache_aware", help="for prefills; of the demo's own engines")
    parser.add_argument("--rate", type=float, help="requests a second; default: 25, or 3 to real engines")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the blocks that end the children
    console = Console(highlight=False)
    try:
        if options.engine != "demo":
            return real.run(console, options.engine, options.requests or 60, options.rate or 3.0)
        return run(console, options.requests or 300, options.policy, options.rate or 25.0)
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
        show = Show(cluster.known)
        tally = Tally()
        with Live(show.table(tally), console=console, refresh_per_second=4) as live:
            asyncio.run(_scenario(cluster, load, tally, rate, show, live))
            live.update(show.table(tally))
        console.print()
        counted = cluster.metrics()
    with console.status("one process alone generates the same"):
        reference = Reference()
        wrong = [one for one in tally.answered if not one.error and one.text != reference.text(one.asked)]
        wrong += [
            one for one in tally.answered if one.error and not reference.text(one.asked).startswith(one.text)
        ]
    show_choices(console, counted)
    status = judge(console, tally, wrong, "one process alone")
    console.print(f"took {time.monotonic() - began:.1f} s")
    return status


async def _scenario(
    cluster: Cluster, load: list[Asked], tally: Tally, rate: float, show: Show, live: Live
) -> None:
    """Drive the load; add a decode after a third of it, kill a prefill after two thirds."""
    driving = asyncio.ensure_future(drive(cluster.url, load, tally, rate))
    is_killed = False
    try:
        while not driving.done():
            if ADDED not in cluster.instances and tally.n_sent > len(load) / 3:
                cluster.start(Role.DECODE, ADDED)
                show.note(f"{ADDED} is added")
            if not is_killed and tally.n_sent > 2 * len(load) / 3:
                cluster.instances[KILLED].kill()
                is_killed = True
                show.note(f"{KILLED} is killed")
            await asyncio.wait({driving}, timeout=_LOOK_S)
            live.update(await asyncio.to_thread(show.table, tally))
        driving.result()
    finally:
        driving.cancel()


if __name__ == "__main__":
    sys.exit(main())
