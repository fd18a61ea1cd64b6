"""What is installed together and what apart: p2pkv is what serves, p2pkv-bench what measures it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def setting(file: str, name: str) -> str:
    """Return the value of ``name`` in a TOML file, as written; it must be there once, on one line."""
    found = re.findall(rf"^{re.escape(name)} = (.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert len(found) == 1, f"{name} is {len(found)} times in {file}"
    return str(found[0])


def test_the_benchmark_wants_the_version_that_it_lies_beside() -> None:
    version = ast.literal_eval(setting("pyproject.toml", "version"))
    assert ast.literal_eval(setting("bench/pyproject.toml", "version")) == version
    assert f"p2pkv[proxy]=={version}" in ast.literal_eval(setting("bench/pyproject.toml", "dependencies"))


def test_the_packages_of_the_wheel_have_no_file_of_the_benchmark() -> None:
    packages = ast.literal_eval(setting("pyproject.toml", "wheel.packages"))
    assert packages == ["p2pkv", "proxy/p2pkv_proxy"]
    files = [path.relative_to(ROOT) for name in packages for path in (ROOT / name).rglob("*.py")]
    assert [file for file in files if "bench" in str(file)] == [Path("p2pkv/cli/bench.py")]
