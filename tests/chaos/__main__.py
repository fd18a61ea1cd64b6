"""Run chaos: ``python -m chaos --seconds 300 --seed 7``. Ends with 0, or with 1 at the first broken promise."""

from __future__ import annotations

import argparse
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from . import etcd, host_schedule, schedule
from .driver import Broken, Driver
from .fleet import Fleet
from .host_driver import HostDriver
from .hosts import N_HOSTS, Hosts, n_places
from .namespaces import Network, unavailable


def main() -> int:
    """Run as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None, help="replays the rounds of that run")
    parser.add_argument(
        "--fleet",
        choices=("nodes", "hosts"),
        default="nodes",
        help="whole nodes, or hosts whose nodes, keepers and attached engines are apart, over etcd",
    )
    parser.add_argument("--nodes", type=int, default=5, help="how many; of hosts there are always three")
    parser.add_argument(
        "--kinds", default="", help="faults to draw from, by comma; default: all of the fleet's"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after a broken promise, and list all"
    )
    given = parser.parse_args()
    of_hosts = given.fleet == "hosts"
    why = unavailable() or (etcd.unavailable() if of_hosts else None)
    if why is not None:
        print(f"chaos is skipped: {why}")
        return 0
    seed = secrets.randbits(31) if given.seed is None else given.seed
    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="p2pkv-chaos-"))
    command = f"PYTHONPATH=tests:tests/support python -m chaos {shlex.join(_again(sys.argv[1:], seed))}"
    print(f"seed {seed}; {command}", flush=True)
    known = host_schedule.KINDS if of_hosts else schedule.KINDS
    kinds = set(given.kinds.split(",")) if given.kinds else set(known)
    if not kinds <= set(known):
        parser.error(f"kinds are {', '.join(known)}")
    with ExitStack() as undo:
        removed = undo.enter_context(ExitStack())
        removed.callback(shutil.rmtree, folder, ignore_errors=True)
        network = Network(n_places(N_HOSTS) if of_hosts else given.nodes - 1)
        undo.callback(network.close)
        for kind, reason in network.lacks().items():
            print(f"no faults of kind '{kind}': {reason}")
            kinds.discard(kind)
        fleet: Fleet | Hosts
        driver: Driver
        if of_hosts:
            fleet = Hosts(N_HOSTS, seed, network, folder)
            undo.callback(fleet.close)
            driver = HostDriver(fleet, seed, kinds, keep_going=given.keep_going)
        else:
            fleet = Fleet(given.nodes, seed, network, folder)
            undo.callback(fleet.close)
            rounds = schedule.rounds(seed, fleet.n, kinds)
            driver = Driver(fleet, rounds, keep_going=given.keep_going)
        try:
            driver.run(given.seconds)
        except Broken:
            pass  # the oracle has it, and it is told below
        if driver.oracle.broken:
            removed.pop_all()  # what was written stays, to be read
            driver.report.failure(fleet)
        driver.report.summary()
        if driver.oracle.broken:
            print(f"replay: {command}")
    return 1 if driver.oracle.broken else 0


def _again(arguments: list[str], seed: int) -> list[str]:
    """Return the command line that replays this run."""
    return arguments if "--seed" in arguments else [*arguments, "--seed", str(seed)]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
