"""What is installed together and what apart: p2pkv is what serves, p2pkv-bench what measures it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

import p2pkv._native
import p2pkv_bench._native

ROOT = Path(__file__).resolve().parents[2]


def setting(file: str, name: str) -> str:
    """Return the value of ``name`` in a TOML file, as written; it must be there once, on one line."""
    found = re.findall(rf"^{re.escape(name)} = (.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert len(found) == 1, f"{name} is {len(found)} times in {file}"
    return str(found[0])


def test_the_benchmark_wants_the_version_that_it_lies_beside() -> None:
    wanted = ast.literal_eval(setting("bench/pyproject.toml", "metadata.dependencies.result"))
    assert "p2pkv[proxy]=={project[version]}" in wanted
    assert f"p2pkv[proxy]=={version('p2pkv-bench')}" in (requires("p2pkv-bench") or [])


def test_the_version_is_found_alike_for_both_and_without_a_tag() -> None:
    for name in ("metadata.version.provider", "local_scheme", "fallback_version"):
        assert setting("pyproject.toml", name) == setting("bench/pyproject.toml", name)
    assert setting("bench/pyproject.toml", "root") == '".."'


def test_a_wheel_is_built_for_every_python_that_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    assert declared
    assert ast.literal_eval(setting("pyproject.toml", "requires-python")) == f">=3.{declared[0]}"
    for file in ("pyproject.toml", "bench/pyproject.toml"):
        assert ast.literal_eval(setting(file, "build")) == [f"cp3{minor}-*" for minor in declared]


def test_a_wheel_is_built_with_every_transport_or_not_at_all() -> None:
    assert ast.literal_eval(setting("pyproject.toml", '"cmake.define.P2PKV_ALL_TRANSPORTS"')) == "ON"
    assert "option(P2PKV_ALL_TRANSPORTS " in (ROOT / "native" / "CMakeLists.txt").read_text()


def test_a_wheel_is_tried_by_the_same_program_everywhere() -> None:
    check = "tools/wheels/check_installed.py"
    command = ast.literal_eval(setting("pyproject.toml", "test-command"))
    assert command == f"python {{project}}/{check} {{project}}/README.md"
    assert Path(check).name in (ROOT / "tools/wheels/test_wheel.py").read_text()
    assert "pipx run cibuildwheel" in (ROOT / ".github/workflows/wheels.yml").read_text()


def test_the_packages_of_the_wheel_have_no_file_of_the_benchmark() -> None:
    packages = dict(re.findall(r'"([^"]+)" = "([^"]+)"', setting("pyproject.toml", "wheel.packages")))
    assert packages == {"p2pkv": "p2pkv", "p2pkv_proxy": "proxy/p2pkv_proxy", "p2pkv_demo/demo": "demo"}
    files = [path.relative_to(ROOT) for name in packages.values() for path in (ROOT / name).rglob("*.py")]
    assert [file for file in files if "bench" in str(file)] == [Path("p2pkv/cli/bench.py")]


def test_the_native_core_has_nothing_of_the_benchmark() -> None:
    binary = Path(p2pkv._native.__file__).read_bytes()
    assert [name for name in dir(p2pkv._native) if "bench" in name.lower()] == []
    streams = [name for name in dir(p2pkv_bench._native) if not name.startswith("_")]
    assert streams == ["receive_spans", "serve_spans"]
    assert [name for name in streams if name.encode() in binary] == []


def test_the_native_build_of_the_wheel_installs_the_core_alone() -> None:
    text = (ROOT / "native/CMakeLists.txt").read_text()
    assert re.findall(r"\binstall\((.*)\)", text) == [
        "TARGETS _native LIBRARY DESTINATION p2pkv",
        "FILES ${CMAKE_CURRENT_BINARY_DIR}/_native.pyi DESTINATION p2pkv",
    ]
    assert "bench" not in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_built_wheel_has_no_file_of_the_benchmark_and_that_of_the_benchmark_nothing_else(
    tmp_path: Path,
) -> None:
    core, bench = wheel_files(ROOT, tmp_path / "core"), wheel_files(ROOT / "bench", tmp_path / "bench")
    assert {name.partition("/")[0] for name in core} == {"p2pkv", "p2pkv_demo", "p2pkv_proxy"}
    assert {"p2pkv_demo/demo/__main__.py", "p2pkv_demo/demo/xpyd/__main__.py"} <= {*core}
    assert [name for name in core if "bench" in name] == ["p2pkv/cli/bench.py"]
    assert sum(name.startswith("p2pkv/_native.") and name.endswith(".so") for name in core) == 1
    assert "p2pkv/_native.pyi" in core
    assert {name.partition("/")[0] for name in bench} == {"p2pkv_bench"}
    assert sum(name.startswith("p2pkv_bench/_native.") and name.endswith(".so") for name in bench) == 1


def wheel_files(project: Path, folder: Path) -> list[str]:
    """Build a wheel; return the names of its files, without those that say what is in it."""
    # with what builds it in this environment, if it is there; else pip fetches that
    isolated = any(find_spec(name) is None for name in ("nanobind", "scikit_build_core", "setuptools_scm"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder)]
    command += [] if isolated else ["--no-build-isolation"]
    # nothing of it runs, so nothing of it is worth optimizing
    command += [
        f"--config-settings={name}" for name in (f"build-dir={folder}/build", "cmake.build-type=Debug")
    ]
    command += [str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return sorted(name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name)
