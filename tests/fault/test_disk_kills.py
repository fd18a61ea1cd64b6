"""Writers of a disk store are killed at any point; the oracle is in :mod:`disk_kill`, outside the killed process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from p2pkv import _native
from p2pkv.disk.store import LAYOUTS

PROGRAM = Path(__file__).parents[1] / "support/disk_kill.py"

needs_zstd = pytest.mark.skipif(bool(_native.zstd_missing()), reason=_native.zstd_missing())


def run(folder: Path, layout: str, compression: str, rounds: int, timeout: float) -> dict[str, int]:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"{layout}, {compression}: seed {seed}")
    command = [sys.executable, str(PROGRAM), str(folder), layout, compression, str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_writers_lose_no_flushed_page(tmp_path: Path, layout: str) -> None:
    assert run(tmp_path, layout, "off", 12, 100)["pages_checked"] > 100


@needs_zstd
def test_killed_writers_that_compress_lose_no_flushed_page(tmp_path: Path) -> None:
    assert run(tmp_path, "bucket", "zstd", 12, 100)["pages_checked"] > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_killed_writers_lose_no_flushed_page(tmp_path: Path, layout: str) -> None:
    assert run(tmp_path, layout, "off", 1000, 1100)["pages_checked"] > 100_000


@needs_zstd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hundreds_of_killed_writers_that_compress_lose_no_flushed_page(tmp_path: Path, layout: str) -> None:
    assert run(tmp_path, layout, "zstd", 300, 550)["pages_checked"] > 30_000


def test_the_oracle_notices_pages_that_were_never_flushed(tmp_path: Path) -> None:
    # The safeguard broken on purpose: the writer claims pages it has not written.
    command = [sys.executable, str(PROGRAM), str(tmp_path), "bucket", "off", "12", "1", "240"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "flushed pages are missing" in done.stderr
