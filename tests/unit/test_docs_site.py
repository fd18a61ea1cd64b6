"""The documentation as a site: it builds without a warning, and its reference is whole."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import p2pkv
from p2pkv.cli import app
from p2pkv.config import Config
from scripts import load_script

ROOT = Path(__file__).parents[2]


reference = load_script("tools/docs/reference.py")
site = load_script("tools/docs/site.py")


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (made.returncode, made.stdout + made.stderr) == (0, "")
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {"index.html", "quickstart.html", "troubleshooting.html", "reference/settings.html"} <= pages
    for page in tmp_path.rglob("*.html"):
        asked = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\"\s>]+)", page.read_text())
        assert not [url for url in asked if "localhost" not in url], f"{page.name} asks others for {asked}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert written | set(site.FROM_ABOVE.values()) | set(reference.PAGES) >= named
    assert {
        page for page in written if not page.startswith("evidence/") or page.endswith("README.md")
    } <= named


def test_every_setting_is_in_the_reference_and_says_what_it_is() -> None:
    page = reference.settings()
    for field in dataclasses.fields(Config):
        [text] = re.findall(rf"^### `{field.name}`\n\n(.*?)(?=^###|\Z)", page, re.S | re.M)
        assert f"P2PKV_{field.name.upper()}" in text
        assert len(text.splitlines()[2]) > 20, f"{field.name} is not explained"


def test_every_public_name_is_in_the_reference() -> None:
    page = reference.python()
    for name in p2pkv.__all__:
        assert re.search(rf"^### `{name}\b", page, re.M), name
    assert "#### `Node.fetch(keys: Sequence[str | bytes], pages: Pages" in page
    assert ":class:" not in page
    assert ":meth:" not in page


def test_every_command_is_in_the_reference() -> None:
    page = reference.commands()
    paths = [path for path, _ in reference.walk(typer.main.get_command(app), "p2pkv")]
    assert {"p2pkv node", "p2pkv namespace bump", "p2pkv explain"} <= set(paths)
    for path in set(paths) - {"p2pkv", "p2pkv namespace"}:
        assert f"\n## `{path}`\n" in page
    assert "| `--join` |" in page


def test_links_out_of_the_documents_stay_on_the_site_or_become_names() -> None:
    assert site.within("[a](../SECURITY.md#x)", "security.md") == "[a](reporting.md#x)"
    assert site.within("[b](../deploy/compose.yaml)", "xpyd.md") == "b (`deploy/compose.yaml`)"
    assert site.within("[c](operations.md)", "xpyd.md") == "[c](operations.md)"
    assert site.at_home("[d](docs/disk.md#y) [e](LICENSE)") == "[d](disk.md#y) [e](../LICENSE)"
