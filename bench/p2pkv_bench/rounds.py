"""Taking turns: on a machine that is never quite idle, only what ran side by side may be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from threading import Barrier, Thread

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


Call = Callable[[], object]


def timed(threads: Sequence[Sequence[Call]]) -> float:
    """Make the calls of each thread in a thread of its own; return how many seconds they take.

    One thread's calls are timed one by one, and count as their median each: a call is over before other programs take
    the processor away, so that on a busy machine most are undisturbed. Several threads are timed together.
    """
    if len(threads) == 1:
        seconds = timed_calls(threads[0])
        return median(seconds) * len(seconds)
    return timed_together(threads)


def timed_together(threads: Sequence[Sequence[Call]]) -> float:
    """Make the calls of each thread in a thread of its own; return the seconds until all are done.

    One thread is timed so where it is compared with several: its median call would leave out what they can't.
    """
    barrier = Barrier(len(threads) + 1)
    failures: list[BaseException] = []

    def run(calls: Sequence[Call]) -> None:
        try:
            barrier.wait()
            for call in calls:
                call()
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
            failures.append(error)

    running = [Thread(target=run, args=(calls,), name="p2pkv-bench") for calls in threads]
    for thread in running:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in running:
        thread.join()
    seconds_of_all = time.perf_counter() - began
    if failures:
        raise failures[0]
    return seconds_of_all


def timed_calls(calls: Iterable[Call]) -> list[float]:
    """Make the calls; return the seconds of each."""
    seconds = []
    for call in calls:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def percentile(seconds: Sequence[float], percent: float) -> float:
    """Return the value that ``percent`` of the values do not exceed."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
