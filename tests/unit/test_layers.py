"""The shape of the house: imports point down only, and the public names are exactly those that are meant to be."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv

PACKAGE = Path(p2pkv.__file__).parent

# Lowest first. What stands on one floor may import its neighbours and everything below, but p2pkv itself never.
FLOORS = [
    {
        "_native",
        "address",
        "errors",
        "config",
        "page",
        "host_arrays",
        "device_arrays",
        "metrics",
        "gate",
        "secret",
        "endings",
        "descriptors",
        "names",
    },
    {"wire", "transports"},
    {"control", "pool", "disk", "memory", "heartbeat", "engine_check"},
    {"directory", "transfer", "handshakes", "counters"},
    {"cache", "flights", "page_call", "device_memory", "registration", "device_pages", "transfers"},
    {"node"},
    {"__init__"},
    {"integrations", "cli", "dashboard", "bench", "testing", "__main__"},
]
PARALLEL = [
    {"directory", "transfer"},
    {"handshakes", "directory"},
    {"handshakes", "transfer"},
    {"integrations", "cli"},
]
"""Neighbours of one floor that don't know each other's inside; what each may import of the other stands below."""
ALLOWED = {("transfer", "directory.view"), ("handshakes", "directory.view")}
"""A member's record is a value; it lives with the view that is made of them."""


def floor_of(part: str) -> int:
    for number, parts in enumerate(FLOORS):
        if part in parts:
            return number
    raise AssertionError(f"p2pkv/{part} stands on no floor; give it one in tests/unit/test_layers.py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name below p2pkv of everything that ``path`` imports from it, wherever it stands."""
    names = {module.stem if module.is_file() else module.name for module in PACKAGE.iterdir()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            modules = [node.module or ""]
            if node.module == "p2pkv":
                modules = [f"p2pkv.{a.name}" if a.name in names else "p2pkv.__init__" for a in node.names]
        else:
            continue
        for module in modules:
            head, _, rest = module.partition(".")
            if head == "p2pkv":
                yield node.lineno, rest or "__init__"


def violations(part: str, source: str, found: list[tuple[int, str]]) -> Iterator[str]:
    for line, target in found:
        imported = target.partition(".")[0]
        where = f"{source}:{line} imports p2pkv.{target}"
        if floor_of(imported) > floor_of(part):
            yield f"{where}, which stands above {part}"
        elif part != imported and {part, imported} in PARALLEL and (part, target) not in ALLOWED:
            yield f"{where}, its neighbour"


def test_imports_point_down_only() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found += violations(part, str(path.relative_to(PACKAGE.parent)), list(imports(path)))
    assert found == []


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ("wire", "from p2pkv.control.sockets import Request"),
        ("pool", "def late():\n    import p2pkv.cache.page_cache"),
        ("directory", "from p2pkv.peers.connections import Memory"),
        ("cache", "from p2pkv import Node"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path: Path, part: str, code: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert len(list(violations(part, "module.py", list(imports(path))))) == 1


def test_the_public_names_are_exactly_those_listed() -> None:
    for name in p2pkv.__all__:
        assert getattr(p2pkv, name).__name__ == name
    hidden = {"importlib", "TYPE_CHECKING"}
    public = {
        name
        for name, value in vars(p2pkv).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in hidden
    }
    assert public == set(p2pkv.__all__)
    assert p2pkv.__all__ == sorted(p2pkv.__all__)
    assert set(p2pkv.__all__) <= set(dir(p2pkv))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nod'"):
        _ = p2pkv.Nod


def test_errors_load_without_numpy_zmq_and_the_native_core() -> None:
    code = "import sys, p2pkv, p2pkv.errors; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "zmq", "msgspec", "p2pkv._native", "p2pkv.node"}
    assert {name for name in loaded if name.startswith("p2pkv")} == {"p2pkv", "p2pkv.errors"}


def test_every_public_error_is_exported() -> None:
    from p2pkv import errors

    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    # ViewError stays inside: a malformed view is dropped and counted, never raised to the user.
    assert defined - {"ViewError"} <= set(p2pkv.__all__)
