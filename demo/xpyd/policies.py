"""``make bench-xpyd``: routers with different policies before the same demo instances, on the same requests.

    python -m demo.xpyd.policies --policies round_robin,prefix,predicted -- --trace TRACE --rate 5 --requests 100

With ``--routers 4`` each policy's router is compared with four that share its load, and with ``--silent`` also with
four that tell each other nothing. What is behind ``--`` goes to ``p2pkv bench serving``. The targets take turns, each
with prompts of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

from demo.xpyd.processes import Cluster
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.policies import POLICIES


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.xpyd.policies", description=__doc__)
    parser.add_argument("--policies", default="round_robin,least_loaded,cache_aware,predicted")
    parser.add_argument("--prefills", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--pool-size", default="64MiB")
    parser.add_argument(
        "--direct-below", type=int, default=32, help="tokens; of the routers that ask the directory"
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="routers know pages by what engines say of them alone"
    )
    parser.add_argument(
        "--page-seconds",
        type=float,
        default=0.0,
        help="engines wait so long for a page instead of computing it",
    )
    parser.add_argument("--routers", type=int, default=1, help="beside each other, to compare with one")
    parser.add_argument("--silent", action="store_true", help="compare also with as many that tell nothing")
    parser.add_argument("bench", nargs="*", help="options of p2pkv bench serving")
    options = parser.parse_args()
    policies = options.policies.split(",")
    engines = ["--pool-size", options.pool_size, *(["--no-tokenizer"] if options.no_tokenizer else [])]
    engines += [f"--page-seconds={options.page_seconds}"]
    with Cluster(_options(policies[0], options), engines) as cluster:
        targets = {policies[0]: cluster.url}
        for policy in policies[1:]:
            targets[policy] = cluster.add_router(_options(policy, options))
        if options.routers > 1:
            targets |= _beside(cluster.add_router, f"{options.routers} routers", options)
        names = [f"prefill-{i}" for i in range(options.prefills)]
        for name in names:
            cluster.start(Role.PREFILL, name)
        others = [f"decode-{i}" for i in range(options.decodes)]
        for name in others:
            cluster.start(Role.DECODE, name)
        cluster.wait(*names, *others)
        if options.routers > 1 and options.silent:
            targets |= _beside(cluster.add_silent_router, f"{options.routers} silent routers", options)
        pages = [f"--metrics={cluster.urls[name]}/metrics" for name in (*names, *others)]
        command = [sys.executable, "-c", "from p2pkv.cli import main; main()", "bench", "serving"]
        command += [*options.bench, *pages, *(f"{name}={urls}" for name, urls in targets.items())]
        return subprocess.run(command, check=False).returncode


def _beside(add: Callable[[list[str]], str], what: str, options: argparse.Namespace) -> dict[str, str]:
    """Have several routers for each policy; return their addresses by the policy and ``what`` they are."""
    found = {}
    for policy in options.policies.split(","):
        urls = [add(_options(policy, options)) for _ in range(options.routers)]
        found[f"{policy}, {what}"] = ",".join(urls)
    return found


def _options(policy: str, options: argparse.Namespace) -> list[str]:
    found = ["--policy", policy, "--decode-policy", "least_loaded"]
    return [*found, "--direct-below", str(options.direct_below)] if POLICIES[policy].wants_holdings else found


if __name__ == "__main__":
    sys.exit(main())
