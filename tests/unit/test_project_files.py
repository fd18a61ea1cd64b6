"""What an open project owes those who meet it: a licence that travels with it, and pages that say what is so."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    *(ROOT / ".github").rglob("*.md"),
]
APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""The SHA-256 of the licence's text as the Apache Software Foundation publishes it."""


def test_the_licence_is_apache_2_0_to_the_letter() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0


def test_what_is_installed_names_its_licence_and_brings_its_text() -> None:
    installed = distribution("p2pkv")
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert installed.metadata.get_all("License-File") == ["LICENSE"]
    text = installed.read_text("licenses/LICENSE")
    assert text is not None
    assert hashlib.sha256(text.encode()).hexdigest() == APACHE_2_0


def test_an_image_is_built_with_the_licence() -> None:
    # the build reads it, and .dockerignore leaves away whatever it does not name
    assert "!LICENSE" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_pages_for_contributors_name_files_that_are_there() -> None:
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`([\w.]+/[\w./*-]+)`", text) + re.findall(r"\]\((?!https?:)([^)#]+)", text)
        missing = [name for name in named if "NAME" not in name and not list(ROOT.glob(name))]
        assert missing == [], f"{page.name} names what is not there"


def test_every_target_of_make_that_a_page_names_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name} names targets that the Makefile lacks: {named - targets}"


def test_git_runs_the_checks_of_make_check_before_a_commit() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    hooks = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    checks = re.compile(r"(ruff format|ruff check|mypy|clang-format)((?: --[\w-]+)*)")
    assert [checks.findall(line) for line in recipe[1].splitlines()] == [
        checks.findall(hook) for hook in hooks
    ]
    assert all(checks.findall(hook) for hook in hooks)


def test_continuous_integration_runs_what_anybody_can_run() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"run: (.*)", workflow) == ["sudo -H .ci/run"]
    assert "cache" not in re.sub(r"#.*", "", workflow)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
