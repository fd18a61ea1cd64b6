"""The shape of the native core: folders include only what stands below them, and every transport has the same files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "native/src"
TRANSPORTS = ("shm", "cuda_ipc", "tcp", "verbs", "ucx", "nccl")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)

# Lowest first; what a folder may include besides itself.
BELOW = {
    "base": set(),
    "page": {"base"},
    "net": {"base", "page"},
    "relay": {"base"},
    "cuda": {"base", "page"},
    "codec": {"base", "page"},
    "pool": {"base", "page", "codec"},
    "disk": {"base", "page", "codec", "pool"},
    "transports": {"base", "page", "net"},
    **{f"transports/{name}": {"base", "page", "net", "transports"} for name in TRANSPORTS},
    # those that know of devices
    "transports/cuda_ipc": {"base", "page", "net", "cuda", "transports"},
    "transports/nccl": {"base", "page", "net", "cuda", "transports"},
    "transports/verbs": {"base", "page", "net", "cuda", "transports"},
    "peers": {"base", "page", "transports"},
    "directory": {"base", "page", "net"},
    "control": {"base", "net", "page", "pool", "directory"},
    "offers": {"base", "page", "net", "cuda", "transports", "peers"},
    "attach": {"base", "page", "net", "pool", "disk", "directory"},
    "cache": {"base", "page", "codec", "net", "pool", "disk", "transports", "peers", "directory"},
}
ABOVE_ALL = "bindings"


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def violations(source: str, text: str) -> list[str]:
    """Return what a file of that name below ``native/src`` must not include."""
    folder = folder_of(source)
    found = []
    for name in _INCLUDE.findall(text):
        included = folder_of(name)
        if not (SOURCES / name).is_file():
            found.append(f"{source} includes {name}, which is no path below native/src")
        elif included != folder and folder != ABOVE_ALL and included not in BELOW[folder]:
            found.append(f"{source} includes {name}, which {folder} does not stand on")
    return found


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cc")}
    assert folders == {*BELOW, ABOVE_ALL}


def test_a_folder_stands_on_those_before_it() -> None:
    before: set[str] = set()
    for folder, below in BELOW.items():
        assert below <= before, f"{folder} stands on {below - before}, which come later"
        before.add(folder)


def test_includes_point_down_only() -> None:
    found = []
    for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cc")]):
        found += violations(path.relative_to(SOURCES).as_posix(), path.read_text())
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("base/clock.h", "net/wire.h"),
        ("directory/shard.cc", "transports/transport.h"),
        ("transports/tcp/reader.cc", "transports/shm/reader.h"),
        ("pool/pool.cc", "disk/tier.h"),
        ("pool/pool.cc", "pool.h"),
    ],
)
def test_an_include_that_points_up_is_found(source: str, name: str) -> None:
    assert len(violations(source, f'#include "{name}"\n')) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_has_the_same_files(transport: str) -> None:
    files = {path.name for path in (SOURCES / "transports" / transport).iterdir()}
    assert {"transport.cc", "frames.h", "reader.h", "reader.cc", "server.h", "server.cc"} <= files
