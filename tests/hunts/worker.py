"""A process that runs one hunt, schedule by schedule, and says as JSON lines how far it has come.

It is apart from the one that reports, so that a crash or a hang is a finding with a seed, and not the end of the run.
A nursery forks it, which has imported all hunts: that would take each of them two seconds of a processor.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback

from footprint import Footprint
from hunts.found import hunts
from hunts.frame import Broken, Tally
from hunts.levels import Levels

BROKEN = 3
"""The exit code after a broken promise."""


def hunt_for(name: str, first_seed: int, seconds: float, *, replay: bool) -> int:
    """Run schedules from ``first_seed`` on for ``seconds``, the first one whatever it takes; ``replay`` repeats one."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    hunt = hunts()[name]
    started = time.monotonic()
    tally = Tally()
    levels = Levels()
    n_schedules, seed, rss = 0, first_seed, 0

    def say(**more: object) -> None:
        record = {
            "seed": seed,
            "schedules": n_schedules,
            "seconds": time.monotonic() - started,
            "tally": dict(tally),
        }
        print(json.dumps(record | {"grown": max(0, Footprint.of(os.getpid()).rss - rss)} | more), flush=True)

    while n_schedules == 0 or time.monotonic() - started < seconds:
        say()
        faulthandler.dump_traceback_later(hunt.patience, exit=True)
        try:
            hunt.run(seed, tally, lambda: time.monotonic() - started >= seconds)
            n_schedules += 1
            levels.check()
        except Broken as broken:
            say(broken=str(broken), traceback=traceback.format_exc())
            return BROKEN
        finally:
            faulthandler.cancel_dump_traceback_later()
        if n_schedules == 3:
            rss = Footprint.of(os.getpid()).rss
        seed += 0 if replay else 1
    if not replay and (missing := hunt.missing(n_schedules, tally)):
        what = (
            f"{n_schedules} schedules had none of: {', '.join(missing)}; do the hunt's faults lead anywhere?"
        )
        say(broken=what, traceback=what)
        return BROKEN
    say(done=True)
    return 0


def main() -> None:
    """Run what the command line says: a hunt's name, its first seed, the seconds, and perhaps ``--replay``."""
    name, first_seed, seconds, *more = sys.argv[1:]
    sys.exit(hunt_for(name, int(first_seed), float(seconds), replay="--replay" in more))


hunts()  # here, since this module is imported before the process is forked
