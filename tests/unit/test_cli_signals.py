"""Ending a command by a signal, whenever it comes."""

from __future__ import annotations

import os
import signal

import pytest

from p2pkv.cli.signals import EndedError, EndingSignals


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


@pytest.mark.parametrize("came_before", [False, True])
def test_a_signal_breaks_off_what_can_not_look_for_it(came_before: bool) -> None:
    def be_ended() -> None:
        assert not came_before, "it is not heeded"
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    with EndingSignals() as ending:
        if came_before:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EndedError), ending.raised():
            be_ended()
        assert ending.wait(), "it is forgotten"
    assert signal.getsignal(signal.SIGTERM) is before
