"""A release is a tag: it is the version of what is built, and CHANGELOG tells of it in the form of Keep a Changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
RELEASE = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d")


def flaws(text: str, tags: set[str]) -> list[str]:
    """Say where a changelog is not in its form, or lacks a release that has a tag."""
    found = []
    heads = re.findall(r"^(##?#?) (.+)$", text, re.MULTILINE)
    if heads[:2] != [("#", "Changelog"), ("##", "[Unreleased]")]:
        found.append("it does not begin with what is not released yet")
    releases = [head for level, head in heads if level == "##"][1:]
    numbers = [match.groups() if (match := RELEASE.fullmatch(head)) else None for head in releases]
    found += [f"{head!r} is no release" for head, n in zip(releases, numbers, strict=True) if n is None]
    ordered = [tuple(map(int, n)) for n in numbers if n is not None]
    if ordered != sorted(set(ordered), reverse=True):
        found.append("releases are not in order, the newest first")
    found += [
        f"{head!r} is no kind of change" for level, head in heads if level == "###" and head not in KINDS
    ]
    released = {"v" + ".".join(n) for n in numbers if n is not None}
    return found + [f"{tag} is tagged, and not told of" for tag in sorted(tags - released)]


def _git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a test", "-c", "user.email=test@localhost"]
    done = subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


GOOD = (
    "# Changelog\n## [Unreleased]\n### Fixed\n## [0.2.0] - 2026-11-26\n### Added\n## [0.1.0] - 2026-01-02\n"
)


def test_the_changelog_has_its_form_and_every_release() -> None:
    tags = _git(ROOT, "tag", "--list", "v*").split() if (ROOT / ".git").exists() else []
    assert flaws((ROOT / "CHANGELOG.md").read_text(), set(tags)) == []


@pytest.mark.parametrize(
    ("text", "tags", "n"),
    [
        (GOOD, {"v0.1.0", "v0.2.0"}, 0),
        (GOOD, {"v0.2.1"}, 1),
        (GOOD.replace("## [Unreleased]\n", ""), set(), 1),
        (GOOD.replace(" - 2026-11-26", ""), set(), 1),
        (GOOD.replace("0.2.0", "0.0.9"), set(), 1),
        (GOOD.replace("Fixed", "Mended"), set(), 1),
    ],
)
def test_a_changelog_of_another_form_is_noticed(text: str, tags: set[str], n: int) -> None:
    assert len(flaws(text, tags)) == n, flaws(text, tags)


@pytest.mark.skipif(find_spec("setuptools_scm") is None, reason="setuptools-scm is not installed")
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_tag_is_the_version_of_both_packages_and_what_comes_after_it_is_the_next_ones(
    tmp_path: Path,
) -> None:
    _git(tmp_path, "init", "--quiet")
    (tmp_path / "bench").mkdir()
    for file in ("pyproject.toml", "bench/pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    _git(tmp_path, "add", ".")

    def versions() -> set[str]:
        _git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "a change")
        return {_version(tmp_path), _version(tmp_path / "bench")}

    assert all(version.startswith("0.1.") and ".dev" in version for version in versions())
    _git(tmp_path, "tag", "v1.2.3")
    assert {_version(tmp_path), _version(tmp_path / "bench")} == {"1.2.3"}
    assert versions() == {"1.2.4.dev1"}


def _version(project: Path) -> str:
    command = [sys.executable, "-m", "setuptools_scm"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout.strip()
