"""The shape of the house: imports point down only, and the public names are exactly those that are meant to be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv

PACKAGE = Path(p2pkv.__file__).parent
ROOT = PACKAGE.parent

# Lowest first: what the modules of a folder, or a module that stands alone, import from p2pkv besides themselves.
BELOW = {
    "_native": "",
    "errors": "",
    "plugins": "",
    "address": "errors",
    "values": "errors",
    "state_home": "errors",
    "descriptors": "errors",
    "exemplars": "_native",
    "timings": "_native exemplars",
    "metrics": "_native timings",
    "exposition": "metrics",
    "limited_log": "",
    "served_port": "",
    "bounded_server": "descriptors limited_log",
    "metrics_server": "bounded_server errors exposition limited_log metrics served_port",
    "lifetime": "_native errors",
    "message_types": "",
    "tracing": "errors",
    "arrays": "_native errors",
    "transports": "_native errors plugins values",
    "store_url": "address errors values",
    "config": "address errors plugins store_url transports values",
    "memory": "_native arrays errors lifetime transports limited_log",
    "page": "_native arrays errors",
    "pool": "_native config errors page",
    "control": "_native address errors page state_home limited_log",
    "disk": "_native config errors page pool state_home limited_log",
    "directory": "_native address control disk errors limited_log message_types metrics page plugins pool store_url "
    "transports",
    "membership": "directory",
    "recompute": "errors metrics",
    "peers": "_native control directory errors metrics transports limited_log",
    "offers": "_native config directory errors lifetime transports limited_log",
    "transfers": "offers",
    "cache": "_native arrays control directory disk errors lifetime limited_log memory message_types metrics page "
    "peers pool transports",
    "attach": "_native cache config control directory errors limited_log memory metrics page transports",
    "keeper": "attach descriptors errors limited_log transports",
    "explain": "_native control directory disk errors limited_log message_types metrics page pool transports",
    "dashboard": "address control directory errors explain metrics_server",
    "indexer": "bounded_server directory errors limited_log message_types page served_port",
    "kv_events": "_native disk errors page pool limited_log",
    "parts": "_native address attach cache config control dashboard descriptors directory disk errors explain indexer "
    "keeper kv_events lifetime limited_log memory metrics metrics_server offers page peers pool served_port tracing "
    "transports",
    "node": "_native arrays attach cache config directory errors explain lifetime memory offers page parts peers "
    "transports",
    "__init__": "_native cache config directory errors memory node page peers",
    "testing": "_native control directory errors transports",
    "instances": "address config control directory errors message_types",
    "integrations": "_native address attach config errors instances limited_log memory message_types metrics node "
    "offers page recompute tracing transfers",
    "cli": "_native address attach cache config control descriptors directory disk errors explain instances keeper "
    "kv_events memory node parts store_url transports",
    "__main__": "cli",
}
ONLY = {("peers", "directory"): "directory.view", ("offers", "directory"): "directory.view"}
"""All that a folder may import of another one: a member's record, which is a value that lives with the views."""
BENCH = ROOT / "bench/p2pkv_bench"
BELOW_BENCH = (
    "_native cache config control directory disk errors exposition indexer memory metrics node offers "
    "page parts pool testing transfers transports values"
)


def below(room: str) -> set[str]:
    assert room in BELOW, f"p2pkv/{room} has no place; give it one in tests/unit/test_layers.py"
    return set(BELOW[room].split())


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


def violations(room: str, source: str, found: list[tuple[int, str]]) -> Iterator[str]:
    for line, target in found:
        imported = target.partition(".")[0]
        where = f"{source}:{line} imports p2pkv.{target}"
        if imported != room and imported not in below(room):
            yield f"{where}, which {room} does not stand on"
        elif not target.startswith(ONLY.get((room, imported), "")):
            yield f"{where}, whose inside is not {room}'s business"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_down_only() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += violations(room_of(path), str(path.relative_to(PACKAGE.parent)), list(imports(path)))
    assert found == []


def test_every_room_stands_on_those_before_it() -> None:
    before: set[str] = set()
    for room in BELOW:
        assert below(room) <= before, f"{room} stands on {below(room) - before}, which come later"
        before.add(room)


def test_what_a_room_is_said_to_stand_on_it_uses() -> None:
    used: dict[str, set[str]] = {"_native": set()}
    for path in PACKAGE.rglob("*.py"):
        rooms = {target.partition(".")[0] for _, target in imports(path)}
        used.setdefault(room_of(path), set()).update(rooms - {room_of(path)})
    assert {room: below(room) for room in BELOW} == used


def test_the_benchmark_stands_on_what_it_is_said_to() -> None:
    used = {target.partition(".")[0] for path in BENCH.rglob("*.py") for _, target in imports(path)}
    assert used == set(BELOW_BENCH.split())


def test_nothing_that_serves_knows_the_benchmark_but_the_command_that_looks_for_it_by_name() -> None:
    served = [*PACKAGE.rglob("*.py"), *(ROOT / "proxy").rglob("*.py")]
    assert [path for path in served if "p2pkv_bench" in path.read_text()] == [PACKAGE / "cli/bench.py"]
    assert not re.search(
        r"^\s*(import|from) p2pkv_bench", (PACKAGE / "cli/bench.py").read_text(), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("control", "from p2pkv.directory.view import View"),
        ("pool", "def late():\n    import p2pkv.cache"),
        ("directory", "from p2pkv.peers.connections import PeerConnections"),
        ("peers", "from p2pkv.directory.client import DirectoryClient"),
        ("cache", "from p2pkv import Node"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path: Path, room: str, code: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert len(list(violations(room, "module.py", list(imports(path))))) == 1


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


def test_a_node_is_started_without_what_only_others_and_few_nodes_need() -> None:
    code = "import sys, p2pkv.cli.node, p2pkv.cli.keeper; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "p2pkv.node" in loaded
    assert not loaded & {
        "importlib.metadata",
        "prometheus_client",
        "rich",
        "http.client",
        "http.server",
        "ssl",
    }


def test_a_node_of_built_in_parts_is_started_without_looking_through_what_is_installed() -> None:
    code = """
        import sys
        from p2pkv import Config, Node
        options = {"tcp": {"streams": 2}}
        config = Config(listen="127.0.0.1:0", pool_size="4MiB", transports=["shm", "tcp"], transport_options=options)
        Node.start(config).close()
        print("importlib.metadata" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


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
