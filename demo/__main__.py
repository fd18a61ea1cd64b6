"""``make demo``: two prompts through two prefill engines and a decode node, checked token for token.

The second prompt continues the first one, but goes to the other prefill engine: it computes only what is new,
since p2pkv brings it the rest. Then the engine that computed the first prompt is killed. Its pages are with its
host's node, and its successor answers the prompt with them. Exits with 0 only if every output is what one process
alone generates, and with nothing missed.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time

from rich.console import Console

from demo import messages
from demo.cluster import Cluster, WorkerError, running
from demo.model import PAGE, encode
from demo.report import Report
from demo.served import Request, Served, Survived

HOST_NODE = "host-0"
ATTACHED = "prefill-0"
"""An engine that has no pool of its own: it uses that of the host's node, which outlives it."""
PREFILL_NODE = "prefill-1"
DECODE_NODE = "decode-0"
MAX_PROMPT_BYTES = 1024
N_NEW = 32
"""Tokens to generate."""

PROMPT = b"""\
A server that generates text first reads the whole prompt and computes, for every token and every layer, a \
key and a value: the KV cache. Then it writes one token after the other and looks at that cache each time. \
Reading is bound by arithmetic and writing by memory, so large installations let different machines do \
them, and the cache has to travel. Many prompts also begin alike: with the same instructions, the same \
document, the same conversation so far. What one machine has computed for them, another one need not \
compute again, if it knows where to find it and can trust it. How would you explain this to a child?
"""
FOLLOW_UP = b"\nThank you. And now tell it again in one sentence, as if we were standing at a whiteboard."

DESCRIPTION = "Serve two prompts with three engines that share KV pages through p2pkv, and kill one of them."


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=DESCRIPTION)
    parser.add_argument("prompt", nargs="?", help="your text instead of the built-in one; may be empty")
    # spoils the fetched KV, to test that it is noticed
    parser.add_argument("--sabotage", action="store_true", help=argparse.SUPPRESS)
    # a model that is computed sooner, to test all that is around it
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # a terminal may pass bytes that are no text; they are as good as any others
    asked = PROMPT if options.prompt is None else os.fsencode(options.prompt)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show something must not end the demo
    report = Report(Console(highlight=False))
    try:
        return run(asked, report, ["--sabotage"] * options.sabotage + ["--small"] * options.small)
    except WorkerError as error:
        report.problem(str(error))
        return 1
    except KeyboardInterrupt:
        report.problem("interrupted")
        return 128 + signal.SIGINT


def run(asked: bytes, report: Report, worker_options: list[str]) -> int:
    """Start the processes, serve both prompts, kill one, show what happened; return the exit status."""
    started = time.monotonic()
    prompt = asked[:MAX_PROMPT_BYTES]
    n_known = len(encode(prompt)) // PAGE * PAGE
    report.prompt(asked, prompt)
    report.follow_up(FOLLOW_UP, n_known)
    with running(worker_options) as cluster:
        with report.progress("four processes start and meet") as progress:
            cluster.start_host(HOST_NODE)
            cluster.start_attached(ATTACHED)
            for node_id in (PREFILL_NODE, DECODE_NODE):
                cluster.start(node_id)
            members = cluster.meet(progress)
        report.members(members)
        report.attached(ATTACHED, HOST_NODE)
        request = Request("prompt 1", encode(prompt), n_known=0)
        first = serve(cluster, request, ATTACHED, report)
        report.served(first)
        request = Request("prompt 2", encode(prompt + FOLLOW_UP), n_known)
        second = serve(cluster, request, PREFILL_NODE, report)
        report.served(second)
        survived = survive(cluster, first, report)
        report.survived(survived)
    report.summary([first, second], time.monotonic() - started)
    problems = [problem for one in (first, second, survived) for problem in one.problems()]
    for problem in problems:
        report.problem(problem)
    return 1 if problems else 0


def serve(cluster: Cluster, request: Request, prefill_node: str, report: Report) -> Served:
    """Serve a prompt with p2pkv, then once more on the decode node alone."""
    prompt = request.prompt
    prefill, decode = cluster.workers[prefill_node], cluster.workers[DECODE_NODE]
    started = time.monotonic()
    with report.progress(f"{prefill_node} reads {request.name}") as progress:
        prefilled = prefill.call(messages.Prefill(prompt), messages.PrefillDone, progress)
        prefill_seconds = time.monotonic() - started
    with report.progress(f"{DECODE_NODE} answers with its pages") as progress:
        generated = decode.call(messages.Generate(prompt, N_NEW), messages.GenerateDone, progress)
    with report.progress(f"{DECODE_NODE} does it all alone") as progress:
        alone = decode.call(messages.GenerateAlone(prompt, N_NEW), messages.GenerateDone, progress)
    return Served(
        request=request,
        prefill_node=prefill_node,
        decode_node=DECODE_NODE,
        prefill_seconds=prefill_seconds,
        prefilled=prefilled,
        generated=generated,
        alone=alone.result,
    )


def survive(cluster: Cluster, first: Served, report: Report) -> Survived:
    """Kill the attached engine, and have its successor answer the prompt whose pages it had computed."""
    with report.progress(f"{ATTACHED} is killed, and started anew") as progress:
        cluster.replace_attached(ATTACHED, progress)
    command = messages.Generate(first.request.prompt, N_NEW)
    with report.progress(f"{ATTACHED} answers {first.request.name}") as progress:
        generated = cluster.workers[ATTACHED].call(command, messages.GenerateDone, progress)
    return Survived(
        request=first.request,
        generated=generated,
        alone=first.alone,
        engine_name=ATTACHED,
        host_node=HOST_NODE,
    )


if __name__ == "__main__":
    sys.exit(main())
