"""Pages on peers' disks that a look-up has found are warmed beside the calls."""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import pytest

from p2pkv.cache.warmer import Warmer
from p2pkv.directory.client import DirectoryClient
from p2pkv.page import LOCATION, as_bytes

OWN, OTHER = 1, 2


class Asked:
    """Takes note of what a directory is asked to promote."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()

    def promote(self, *_: object, **__: object) -> None:
        self.was_asked.set()


def test_without_a_thread_to_be_had_nothing_is_warmed_and_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asked = Asked()
    warmer = Warmer(cast(DirectoryClient, asked), OWN)
    cold = np.zeros(1, LOCATION)
    cold["owner"] = OTHER
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        warmer.warm(np.zeros((1, 16), np.uint8), as_bytes(cold))
    warmer.warm(np.zeros((1, 16), np.uint8), as_bytes(cold))
    assert asked.was_asked.wait(30.0)
    warmer.close()
