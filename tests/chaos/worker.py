"""One process of a fleet: ``python -m chaos.worker SETTINGS`` (JSON); commands come as JSON lines on stdin.

Its wall clock is its own (``time.time_ns`` is replaced before p2pkv is imported, for time namespaces know no wall
clock). A metronome measures how late a timer of 10 ms comes: what this process could not do, being stopped, starved or
held, is no lateness of p2pkv's. It dies with the driver. SIGUSR1 writes every thread's stack to stderr.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .journal import Journal, JournalReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pkv import Node

    from .load import PageLoad
    from .threads import Threads

_TICK_S = 0.01
_LATE_S = 0.003
_TELL_S = 0.25
_PR_SET_PDEATHSIG = 1
_EXPELLED = "is no member of its cluster"


class Clock:
    """The wall clock as this process sees it."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self._real = time.time_ns
        time.time_ns = self._now

    def _now(self) -> int:
        return self._real() + int(self.ahead_s * 1e9)


class Expulsions(logging.Handler):
    """Has the driver told when the node says that it was expelled: nobody in a run deserves it."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.ERROR)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if _EXPELLED in text:
            self._journal.write("broken", what=f"a healthy node was expelled: {text}")


def keep_time(journal: Journal) -> None:
    """Write down for ever when this process was late, and now and then up to when that is known."""
    told = 0.0
    while True:
        began = time.monotonic()
        time.sleep(_TICK_S)
        ended = time.monotonic()
        if ended - began > _TICK_S + _LATE_S:
            journal.write("late", b=began + _TICK_S, e=ended)
        if ended > told + _TELL_S:
            journal.write("tick", t=ended)
            told = ended


def look(load: PageLoad, ask: dict[str, Any], journal: Journal, into: Any) -> None:
    """Fetch the pages that the driver asks for, and say which came."""
    from .load import BATCH

    found: dict[str, list[int]] = {}
    for owner, numbers in ask["pages"].items():
        found[owner] = []
        for first in range(0, len(numbers), BATCH):
            found[owner] += load.fetch(owner, numbers[first : first + BATCH], into)
    journal.write("looked", id=ask["id"], found=found)


def main() -> None:
    """Start the node and its load, then do as told until ``end``."""
    settings = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends everybody in order
    clock = Clock(settings["ahead_s"])
    path = Path(settings["journal"])
    past = JournalReader(path).read()
    journal = Journal(path)
    threading.Thread(target=keep_time, args=(journal,), name="metronome", daemon=True).start()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s"
    )
    logging.getLogger().addHandler(Expulsions(journal))

    from .exchange import Exchange
    from .host_worker import be_engine, be_host
    from .load import PageLoad

    if settings["role"] == "host":
        be_host(settings, clock, journal)
    elif settings["role"] == "engine":
        be_engine(settings, clock, journal, past)
    else:
        node = start(settings, clock, journal)
        load = PageLoad(node, settings["names"], journal, past=past, seed=settings["seed"])
        exchange = Exchange(node, settings["names"], journal, seed=settings["seed"])
        serve(node, [load, exchange], lambda ask, into: obey(ask, load, clock, journal, into), journal)


def start(settings: dict[str, Any], clock: Clock, journal: Journal) -> Node:
    """Start the node, and say so."""
    from p2pkv import Config, Node

    began = time.monotonic()
    node = Node.start(Config(**settings["config"]))
    # an attached engine is no member
    boot = next((member.boot_epoch for member in node.members() if member.node_id == node.node_id), 0)
    took = time.monotonic() - began
    journal.write("up", t=time.monotonic(), boot=boot, s=took, off=clock.ahead_s)
    return node


def serve(
    node: Node, loads: Sequence[Threads], obey: Callable[[dict[str, Any], Any], None], journal: Journal
) -> None:
    """Use the node, and do what the driver says until that is ``end``; then close it."""
    from .contents import Guarded
    from .load import BATCH

    into = Guarded(BATCH)
    reading = node.register_memory(into.rows)
    for load in loads:
        load.start()
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "end":
            break
        obey(ask, into)
    for load in loads:
        load.stop()
    reading.close()
    close(node, journal)


def obey(ask: dict[str, Any], load: PageLoad | None, clock: Clock, journal: Journal, into: Any) -> None:
    """Do one command of the driver's; without a load those of it are for others."""
    if ask["do"] == "hold":
        ctypes.PyDLL(None).usleep(int(ask["s"] * 1e6))  # a PyDLL call keeps the GIL
    elif ask["do"] == "clock":
        clock.ahead_s += ask["s"]
    elif load is None:
        return
    elif ask["do"] == "calm":
        load.calm.set()
    elif ask["do"] == "go":
        load.calm.clear()
    elif ask["do"] == "look":
        look(load, ask, journal, into)


def close(node: Node, journal: Journal) -> None:
    """Close the node, and say how long that took."""
    began = time.monotonic()
    node.close()
    journal.write("ended", b=began, e=time.monotonic())


if __name__ == "__main__":
    main()
