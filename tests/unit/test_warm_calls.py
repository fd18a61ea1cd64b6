"""How much Python a call of a warm cache runs: its policy, read from top to bottom, and no more.

The limits only ever go down. A call that has to learn nothing new is at most 20 functions in 8 files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

import p2pkv
from cluster import eventually
from pair import Pair

PACKAGE = Path(p2pkv.__file__).parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes, each of which holds every entry; the owner has a channel to the reader's shard."""
    pair = Pair(tmp_path_factory.mktemp("pair"))
    eventually(lambda: bool(pair.publish() and pair.reader.counters()["p2pkv_directory_channels"]), 60.0)
    yield pair
    pair.close()


def functions_of(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return file and name of every Python function of p2pkv that ``call`` runs on this thread."""
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            seen.add((code.co_filename, code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def shape(call: Callable[[], object]) -> tuple[int, int]:
    """Return how many functions in how many files a call runs once it is warm."""
    for _ in range(3):
        call()
    seen = functions_of(call)
    print(*sorted(seen), sep="\n")
    return len(seen), len({file for file, _ in seen})


def assert_at_most(found: tuple[int, int], n_functions: int, n_files: int) -> None:
    assert found[0] <= n_functions, f"{found[0]} functions"
    assert found[1] <= n_files, f"{found[1]} files"


def test_an_exists(pair: Pair) -> None:
    keys = pair.publish()
    assert_at_most(shape(lambda: pair.reader.exists(keys)), 11, 7)


def test_a_fetch_from_the_own_pool(pair: Pair) -> None:
    keys = pair.publish()
    assert_at_most(shape(lambda: pair.owner.fetch(keys, pair.source)), 6, 3)


def test_a_fetch_from_a_peer(pair: Pair) -> None:
    keys = pair.publish()
    assert_at_most(shape(lambda: pair.reader.fetch(keys, pair.destination)), 6, 3)


def test_a_publish(pair: Pair) -> None:
    assert_at_most(shape(lambda: pair.owner.publish(pair.fresh_keys(), pair.source)), 21, 8)
