"""A wheel's native code is compiled a folder at a time: names of unnamed namespaces must not meet there.

``native/CMakeLists.txt`` says which sources go together. Here they are only parsed, `make wheel` compiles them.
"""

from __future__ import annotations

import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "native/src"
FOLDERS = sorted(path.name for path in SRC.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_sources_of_a_folder_compile_as_one(folder: str, tmp_path: Path) -> None:
    done = parse(sources(SRC / folder), tmp_path)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "error:" in line)


def test_a_name_that_two_files_of_a_folder_have_is_found(tmp_path: Path) -> None:
    twice = [tmp_path / "one.cc", tmp_path / "two.cc"]
    for file in twice:
        file.write_text("namespace { constexpr int kTick = 1; }\n")
    done = parse(twice, tmp_path)
    assert done.returncode != 0
    assert "kTick" in done.stderr


def sources(folder: Path) -> list[Path]:
    """Return those that can be compiled here: some need headers that not every machine has."""
    found = sorted(path for path in folder.rglob("*.cc") if path.name != "absent.cc")
    if not has_verbs():
        found = [path for path in found if path.parent.name != "verbs" or path.name == "plan.cc"]
    return found


def has_verbs() -> bool:
    command = ["c++", "-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def parse(files: list[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    together = folder / "together.cc"
    together.write_text("".join(f'#include "{file}"\n' for file in files))
    includes = [SRC, Path(sysconfig.get_paths()["include"]), package("nanobind"), package("libucx")]
    command = ["c++", "-fsyntax-only", "-std=c++20", *(f"-I{path}" for path in includes), str(together)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def package(name: str) -> Path:
    """Return the headers of an installed package."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed here; it comes with p2pkv[dev]"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "include"
