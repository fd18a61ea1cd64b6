"""Taking turns: on a machine that is never quite idle, only what ran side by side may be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Barrier, BrokenBarrierError, Thread

Contestant = Callable[[], float]
"""Does one round and returns its figure. Preparing and verifying happen inside, outside of what it times."""


def take_turns(contestants: Mapping[str, Contestant], n_rounds: int) -> dict[str, list[float]]:
    """Run every contestant once a round, each time another one first; a first round is not kept."""
    names = list(contestants)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(n_rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figure = contestants[name]()
            if number > 0:
                figures[name].append(figure)
    return figures


def timed(jobs: Sequence[Callable[[], None]]) -> float:
    """Run the jobs, several in a thread each; return the seconds from the first beginning to the last end."""
    if len(jobs) == 1:
        began = time.perf_counter()
        jobs[0]()
        return time.perf_counter() - began
    barrier = Barrier(len(jobs) + 1)
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait()
            job()
        except BrokenBarrierError:
            return
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
            failures.append(error)

    threads = [Thread(target=run, args=(job,), name="p2pkv-bench") for job in jobs]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failures:
        raise failures[0]
    return seconds


def percentile(seconds: Sequence[float], percent: float) -> float:
    """Return the value that ``percent`` of the values do not exceed."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
