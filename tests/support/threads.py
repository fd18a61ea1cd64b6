"""A call that goes on while its test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_a_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Begin a call; return its thread, to be joined, and where its result is then."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results
