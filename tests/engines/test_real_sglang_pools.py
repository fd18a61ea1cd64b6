"""Pages of SGLang's own pools are stored and come back byte for byte: ``make test-sglang``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from demo.xpyd.real_engines import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def told_by(script: str, folder: Path) -> list[dict[str, Any]]:
    """Have SGLang's interpreter run a script; return the lines of JSON that it prints."""
    done = subprocess.run(
        [SGLang.VENV / "bin" / "python", Path(__file__).with_name(script)],
        env={**os.environ, **SGLang.ENVIRONMENT},
        cwd=folder,  # not the repository: its p2pkv has no native core for this interpreter
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=800,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_pages_of_sglangs_side_pools_come_back(tmp_path: Path) -> None:
    found = told_by("store_side_pools.py", tmp_path)
    assert len(found) == 6
    for pool in found:
        assert (pool["hits"], pool["set"], pool["got"], pool["equal"]) == (3, *[[True] * 3] * 3), pool


def test_servers_of_unequal_size_share_the_heads_of_sglangs_pools(tmp_path: Path) -> None:
    found = told_by("store_split_heads.py", tmp_path)
    assert len(found) == 4
    for pair in found:
        assert (pair["set"], pair["got"], pair["equal"]) == (True, True, [True] * 3), pair
