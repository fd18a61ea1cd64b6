"""A host's node as a process: the pool of the engines that attach to it, which goes on when they end.

It ends when stdin does, so it can't outlive the process that started it. Elsewhere ``p2pkv node`` is this process.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from demo import messages
from p2pkv import Config, Node
from p2pkv.errors import P2PKVError
from p2pkv.testing.processes import claim_stdout

POOL_SIZE = "64MiB"
"""As much as a worker that is a node of its own has."""


def main() -> int:
    """Hold pages until stdin ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.host", description=__doc__)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--join", required=True, help="HOST:PORT at which the nodes of the demo meet")
    parser.add_argument("--attach-listen", required=True, help="unix:PATH where engines attach")
    options = parser.parse_args()
    answers = claim_stdout()
    answer: messages.Answer = messages.Ready()
    config = Config(
        node_id=options.node_id,
        join=[options.join],
        pool_size=POOL_SIZE,
        membership="embedded",
        attach_listen=options.attach_listen,
    )
    try:
        with Node.start(config):
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()
            sys.stdin.buffer.read()
    except P2PKVError as error:
        answer = messages.Failed(str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
