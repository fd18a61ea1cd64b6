"""SGLang's own side pools are stored and come back byte for byte: ``make test-sglang``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from demo.xpyd.real_engines import SGLang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("store_side_pools.py")


def test_pages_of_sglangs_side_pools_come_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [SGLang.VENV / "bin" / "python", SCRIPT],
        env={**os.environ, **SGLang.ENVIRONMENT},
        cwd=tmp_path,  # not the repository: its p2pkv has no native core for this interpreter
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=800,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 6
    for pool in found:
        assert (pool["hits"], pool["set"], pool["got"], pool["equal"]) == (3, *[[True] * 3] * 3), pool
