"""Exceptions that signals' handlers raise in the middle of calls, as Ctrl-C and tests' time-outs do."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import pages
from cluster import eventually
from p2pkv import ClosedError
from p2pkv.lifetime import Gate
from pair import Pair

SOON = 5.0
SEED = 7


class Interrupt(Exception):
    """What the handler raises."""


@contextmanager
def alarms(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(call: Callable[[], object], times: int) -> None:
    """Repeat ``call``, which is broken off at a random moment ``times`` times."""
    n_due = n_raised = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal n_raised
        if n_raised < n_due:
            n_raised += 1
            raise Interrupt

    rng = random.Random(SEED)
    with alarms(handler):
        for _ in range(times):
            try:
                # Again and again: what comes before it is due is no interrupt.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 6e-4), 0.01)
                n_due += 1
                while n_raised < n_due:  # what is raised in a finalizer goes no further
                    call()
            except Interrupt:
                continue


class PythonGate:
    """What the gate was: right, until an exception comes between two of its steps."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.n_inside = 0

    def __enter__(self) -> None:
        with self.changed:
            self.n_inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self.changed:
            self.n_inside -= 1


def test_a_gate_counts_right_whenever_it_is_interrupted() -> None:
    gate, drained = Gate("test"), threading.Event()

    def pass_through() -> None:
        with gate:
            pass

    interrupt(pass_through, 100)
    gate.shut()
    threading.Thread(target=gate.drain, args=(drained.set,), daemon=True).start()
    assert drained.wait(SOON)


def test_a_gate_in_python_loses_count() -> None:
    gate = PythonGate()

    def pass_through() -> None:
        with gate:
            pass

    def is_broken() -> bool:
        # In a thread: one that was interrupted with the lock would get it again.
        thread = threading.Thread(target=interruptible, daemon=True)
        thread.start()
        thread.join(0.2)
        return thread.is_alive() or gate.n_inside != 0

    def interruptible() -> None:
        with gate.changed:
            pass

    for _ in range(100):
        interrupt(pass_through, 20)
        if is_broken():
            return
    pytest.fail("nothing came of 2000 interrupts")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a finalizer was interrupted
# A socket that is lost on its way is closed when it is collected, and pyzmq warns of it.
@pytest.mark.filterwarnings("ignore:Unclosed socket")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_node_whose_calls_are_interrupted_goes_on_and_closes(tmp_path: Path, transport: str) -> None:
    pair = Pair(tmp_path, transports=[transport])
    keys = pair.publish()
    own = [f"own-{key}" for key in keys]

    def use() -> None:
        pair.reader.exists(keys)
        outcomes = pair.reader.fetch(keys, pair.destination)
        assert pages.wrong(pair.destination, keys, outcomes) == []
        pair.reader.publish(own, pair.destination)
        pair.reader.retract(own)

    interrupt(use, 100)
    eventually(lambda: pair.fetch_is_right(keys), SOON)
    gc.collect()
    closer = threading.Thread(target=pair.close, daemon=True)
    closer.start()
    closer.join(SOON)
    assert not closer.is_alive(), "a call that was interrupted is still waited for"


def use_until(deadline: float, pair: Pair, keys: list[str]) -> None:
    while time.monotonic() < deadline:
        pair.reader.exists(keys)
        outcomes = pair.reader.fetch(keys, pair.destination)
        assert pages.wrong(pair.destination, keys, outcomes) == []


def test_a_handler_may_close_the_node_in_the_middle_of_a_call(tmp_path: Path) -> None:
    for delay in (0.0003, 0.0011, 0.0029):
        pair = Pair(tmp_path)
        keys = pair.publish()
        ended = threading.Event()

        def handler(number: int, frame: FrameType | None, pair: Pair = pair) -> None:
            pair.reader.close()

        def watch(ended: threading.Event = ended) -> None:
            if not ended.wait(SOON):
                signal.raise_signal(signal.SIGABRT)

        threading.Thread(target=watch, daemon=True).start()
        with alarms(handler):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(ClosedError):
                use_until(time.monotonic() + SOON, pair, keys)
        ended.set()
        pair.owner.close()
