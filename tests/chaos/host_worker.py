"""What the processes of a host are: its node, as ``p2pkv node`` runs one, and an engine that is attached to it.

A process that can't start, because etcd or its host's node is away, tries again as whatever supervises it would.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from p2pkv import Node, P2PKVError

from . import worker
from .engine_load import EngineLoad
from .journal import Journal, Record

_AGAIN_S = 0.3
_DRAIN_S = 6.0


def be_engine(
    settings: dict[str, Any], clock: worker.Clock, journal: Journal, past: Sequence[Record]
) -> None:
    """Attach, and be an engine until told to end."""
    node = _start(settings, clock, journal)
    load = EngineLoad(node, settings["names"], journal, past=past, seed=settings["seed"])

    def obey(ask: dict[str, Any], into: Any) -> None:
        worker.obey(ask, load, clock, journal, into)
        load.obey(ask)

    worker.serve(node, [load], obey, journal)


def be_host(settings: dict[str, Any], clock: worker.Clock, journal: Journal) -> None:
    """Be the host's node until told to end, or to hand the pages over before."""
    node = _start(settings, clock, journal)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "drain":
            drained = node.drain(_DRAIN_S)
            counts = {"n": drained.n_pages, "h": drained.n_handed_over, "a": drained.n_adopted}
            journal.write("drained", t=time.monotonic(), **counts, why=drained.reason)
        if ask["do"] in ("drain", "end"):
            break
        worker.obey(ask, None, clock, journal, None)
    worker.close(node, journal)


def _start(settings: dict[str, Any], clock: worker.Clock, journal: Journal) -> Node:
    while True:
        try:
            return worker.start(settings, clock, journal)
        except P2PKVError as error:
            journal.write("refused", why=f"{type(error).__name__}: {error}")
            time.sleep(_AGAIN_S)
