"""Whatever becomes of the file that says what was taken back, none of that is found again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from disk_pages import keys_of, open_store, pages_of, spans_of, wait_recovered
from p2pkv._native import Tier
from p2pkv.disk.store import LAYOUTS, ReadStatus
from p2pkv.pool import Pool

N = 40
LINE = 32
CASES = 20
KEYS = keys_of(range(N))


def make(folder: Path, layout: str) -> None:
    """A store in which half of the pages were taken back one by one."""
    pool = Pool(1 << 20, granule=4096, owner=1, boot=1, has_disk=True)
    store = open_store(folder, layout=layout)
    tier = Tier(pool.native, owner=1, boot=1, write=0, admission=0, queue_size=1 << 20, warm_rate=1)
    tier.attach(pool.native, store.native)
    wait_recovered(store)
    pool.publish(KEYS, spans_of(pages_of(range(N))).reshape(-1, 1, 2))
    tier.note_published(KEYS)
    assert store.flush(30)
    for first in range(0, N // 2, 4):
        tier.forget(KEYS[first : first + 4])
        assert tier.wait_cleared(30)
    tier.close()
    assert store.close()
    pool.close()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Change lines in use; not to zeros, which nobody can tell from a line that was never written."""
    n_used = len(content.rstrip(b"\0")) // LINE + 1
    changed = bytearray(content)
    if chance.random() < 0.2:
        return bytes(changed[: chance.randrange(LINE * n_used) // LINE * LINE + chance.randrange(1, LINE)])
    for _ in range(chance.choice([1, 1, 1, 8])):
        changed[chance.randrange(LINE * n_used)] ^= chance.randrange(1, 256)
    return bytes(changed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_brings_nothing_back(tmp_path: Path, layout: str) -> None:
    make(tmp_path / "made", layout)
    content = (tmp_path / "made" / "recalls").read_bytes()
    assert content.rstrip(b"\0"), "nothing was written down"
    for seed in range(CASES):
        shutil.copytree(tmp_path / "made", tmp_path / "case")
        (tmp_path / "case" / "recalls").write_bytes(damaged(content, random.Random(seed)))
        store = open_store(tmp_path / "case", layout=layout)
        wait_recovered(store)
        memory = np.zeros((N // 2, pages_of([0]).shape[1]), np.uint8)
        statuses = store.read(KEYS[: N // 2], spans_of(memory), 30.0)
        assert not (statuses == ReadStatus.HIT).any(), f"seed {seed}"
        assert store.close()
        shutil.rmtree(tmp_path / "case")
