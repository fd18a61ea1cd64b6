"""What is carried to a machine without a network is all that p2pkv is built, run and tested with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/without_network/wheels.py")


def test_what_is_built_run_and_tested_with_is_carried(tool: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = settings["build-system"]["requires"] + settings["project"]["dependencies"]
    wanted += settings["project"]["optional-dependencies"]["test"]
    carried = tool.requirements()
    assert [text for text in wanted if text not in carried] == [
        text for text in wanted if text.startswith("libucx")
    ]


def test_wheels_are_told_apart_by_their_packages(tool: ModuleType) -> None:
    assert tool.name_of(Path("scikit_build_core-1.1.2-py3-none-any.whl")) == "scikit-build-core"
    assert tool.name_of(Path("PyYAML-6.0.4-cp312-cp312-manylinux2014_x86_64.whl")) == "pyyaml"
