"""A forked child that ends within a ``with`` block of its parent's pins and prefetches waits for nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from forked import forked, leave
from pair import Pair


def test_a_forked_child_leaves_pins_and_prefetches_though_their_locks_were_held(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    keys = pair.publish()
    pin = pair.owner.pin(keys, 60.0)
    prefetch = pair.reader.prefetch(keys)
    assert prefetch.wait(60.0)
    # a thread that a child does not have holds what both of them take
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with pin._pins._lock, prefetch._lock:
            is_held.set()
            is_over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    assert forked(leave(prefetch)) == 7
    assert forked(leave(pin)) == 7
    is_over.set()
    holder.join()
    assert pin.seconds_left > 0
    assert pin.release() == np.count_nonzero(pin.outcomes)
    pair.close()
