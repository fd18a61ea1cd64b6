"""Ending a command by a signal, whenever it comes."""

from __future__ import annotations

import os
import signal

import pytest

from p2pkv.cli.signals import EndingSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_even_if_it_came_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with EndingSignals() as ending:
        assert not ending.wait(0.0)
        os.kill(os.getpid(), number)
        assert ending.wait()
        assert ending.wait(), "it is forgotten"
    assert signal.getsignal(number) is before


def test_another_signal_ends_nothing() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with EndingSignals() as ending:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not ending.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            assert ending.wait()
    finally:
        signal.signal(signal.SIGUSR2, before)
