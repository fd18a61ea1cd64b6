"""``make bench-xpyd``: routers with different policies before the same demo instances, on the same requests.

    python -m demo.xpyd.policies --policies round_robin,prefix,predicted -- --trace TRACE --rate 5 --requests 100

What is behind ``--`` goes to ``p2pkv bench serving``. The targets take turns, each with prompts of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

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
    parser.add_argument("bench", nargs="*", help="options of p2pkv bench serving")
    options = parser.parse_args()
    policies = options.policies.split(",")
    engines = ["--pool-size", options.pool_size, *(["--no-tokenizer"] if options.no_tokenizer else [])]
    with Cluster(_options(policies[0], options), engines) as cluster:
        targets = [f"{policies[0]}={cluster.url}"]
        for policy in policies[1:]:
            targets.append(f"{policy}={cluster.add_router(_options(policy, options))}")
        names = [f"prefill-{i}" for i in range(options.prefills)]
        for name in names:
            cluster.start(Role.PREFILL, name)
        others = [f"decode-{i}" for i in range(options.decodes)]
        for name in others:
            cluster.start(Role.DECODE, name)
        cluster.wait(*names, *others)
        pages = [f"--metrics={cluster.urls[name]}/metrics" for name in (*names, *others)]
        command = [sys.executable, "-c", "from p2pkv.cli import main; main()", "bench", "serving"]
        return subprocess.run([*command, *options.bench, *pages, *targets], check=False).returncode


def _options(policy: str, options: argparse.Namespace) -> list[str]:
    found = ["--policy", policy, "--decode-policy", "least_loaded"]
    return [*found, "--direct-below", str(options.direct_below)] if POLICIES[policy].wants_holdings else found


if __name__ == "__main__":
    sys.exit(main())
