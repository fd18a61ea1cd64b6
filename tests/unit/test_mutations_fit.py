"""Planted bugs are kept: every patch still fits the code it breaks, and names a hunter that is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hunts.found import names
from mutations.planted import planted

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("bug", planted(), ids=lambda bug: bug.name)
def test_a_planted_bug_fits_and_has_a_hunter(bug, tmp_path):
    for name in bug.files:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            copy.write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        ["git", "apply", "--check", str(bug.path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\nmake {bug.path.name} anew with git diff"
    kind, *arguments = bug.hunter
    if kind == "hunt":
        assert arguments[0] in names()
    if kind in ("pytest", "rdma"):
        assert (ROOT / arguments[0].partition("::")[0]).exists()


def test_the_documentation_lists_the_planted_bugs_that_there_are():
    listed = re.findall(
        r"^\| `(\w+)` \|.*\| [0-9,]+ s \|$", (ROOT / "docs/testing.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(bug.name for bug in planted())
