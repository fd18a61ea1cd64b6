"""One of pytest's processes runs all tests of a module that share something, and makes that once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharing import group_of


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder that all processes of this run would make; the second one fails."""
    if not pytestconfig.getoption("loadgroup", False):
        pytest.skip("tests are not dealt out by groups")
    made = tmp_path_factory.getbasetemp().parent / "made-once"  # of all of this run's processes
    made.mkdir()
    return made


@pytest.mark.parametrize("number", range(8))
def test_tests_that_share_a_fixture_run_in_one_process(made_once: Path, number: int) -> None:
    assert made_once.is_dir()


@pytest.mark.parametrize(
    ("text", "belongs"),
    [
        ('@pytest.fixture(scope="module", params=[8, 2])\ndef nodes(): ...\n', "its module"),
        ('pytestmark = [needs_etcd, pytest.mark.xdist_group("etcd")]\n', "etcd"),
        ("@pytest.fixture\ndef node(): ...\n", None),
        ('@pytest.fixture(scope="session")\ndef kind(): ...\n', None),
    ],
)
def test_a_modules_text_says_what_its_tests_belong_to(tmp_path: Path, text: str, belongs: str | None) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(text)
    assert group_of(module) == (str(module) if belongs == "its module" else belongs)
