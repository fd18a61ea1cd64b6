"""docs/architecture.md is true: its floors agree with who may import whom, and what it names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_layers
import test_native_layers

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PYTHON = {room: test_layers.below(room) for room in test_layers.BELOW}
NATIVE = {**test_native_layers.BELOW, test_native_layers.ABOVE_ALL: set(test_native_layers.BELOW)}
_NAME = re.compile(r"[A-Z]\w+(?:\.|::)\w+|\w+_after_\w+")


def pictures(page: str) -> list[str]:
    found: list[str] = re.findall(r"^```mermaid\n(.*?)^```", page, re.S | re.M)
    return found


def wrong_floors(picture: str, below: dict[str, set[str]]) -> Iterator[str]:
    """Yield what contradicts ``below``, which says of each room what it stands on."""
    floors = re.findall(r"subgraph (\w+) \[.*?\]\n\s*direction LR\n\s*(.*?)\n\s*end", picture)
    rooms = [room for _, row in floors for room in row.split(" ~~~ ")]
    for room in sorted({*rooms, *below}):
        if room not in below or rooms.count(room) != 1:
            yield f"{room} is drawn {rooms.count(room)} times, and is {'' if room in below else 'not '}a room"
    for i, room in enumerate(rooms):
        for other in sorted(below.get(room, set()) & set(rooms[:i])):
            yield f"{room} stands on {other}, which is drawn above it or to its left"
    chain = " --> ".join(name for name, _ in floors)
    arrows = [line.strip() for line in picture.splitlines() if re.search(r"--|==|-\.", line)]
    if arrows != [chain]:
        yield f"the arrows are {arrows}, and should lead from floor to floor: {chain}"


def wrong_rows(page: str, heading: str, below: dict[str, set[str]]) -> Iterator[str]:
    """Yield rooms that have no line in the table below ``heading``, and lines that no room has."""
    table = page.partition(f"| {heading} |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`([\w/]+)`", row.partition(" |")[0])}
    yield from (f"the table lacks {room}" for room in sorted(set(below) - named))
    yield from (f"the table has {room}, which is no room" for room in sorted(named - set(below)))


def defines(path: Path, name: str) -> bool:
    """Whether this file defines a method, ``Class.method`` in Python and ``Class::method`` in C++, or a function."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.search(rf"^[\w:<>,*& ]*\b{name}\(.*(?:\{{|,)$", text, re.MULTILINE) is not None
    owner, _, method = name.partition(".")
    return any(
        isinstance(part, ast.FunctionDef) and part.name == method
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for part in node.body
    )


def wrong_names(page: str) -> Iterator[str]:
    """Yield files that are not there, and functions that are not where the page says."""
    for path in re.findall(r"`([\w.]+/[\w./]+\.\w+)`", page):
        if not (ROOT / path).is_file():
            yield f"{path} is not there"
    table = page.partition("| in the picture |")[2].partition("\n\n")[0]
    listed = set()
    for names, path in re.findall(r"^\| (`.*`) \| `(.*)` \|$", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            listed.add(name)
            if (ROOT / path).is_file() and not defines(ROOT / path, name):
                yield f"{path} defines no {name}"
    drawn = set(_NAME.findall(pictures(page)[2]))
    yield from (f"the table does not say where {name} is" for name in sorted(drawn - listed))
    yield from (f"the table has {name}, which is not in the picture" for name in sorted(listed - drawn))


def wrongs(page: str) -> list[str]:
    python, native, _ = pictures(page)
    return [
        *wrong_floors(python, PYTHON),
        *wrong_floors(native, NATIVE),
        *wrong_rows(page, "room", PYTHON),
        *wrong_rows(page, "folder", NATIVE),
        *wrong_names(page),
    ]


def test_the_page_agrees_with_the_code() -> None:
    assert wrongs(PAGE) == []


@pytest.mark.parametrize(
    ("true", "wrong", "seen"),
    [
        ("disk ~~~ pool", "pool ~~~ disk", "disk stands on pool"),
        ("directory ~~~ control", "control ~~~ peers", "directory is drawn 0 times"),
        ("config ~~~ page", "config ~~~ helpers ~~~ page", "helpers is drawn 1 times, and is not a room"),
        ("cache ~~~ offers ~~~ control", "cache ~~~ net ~~~ control", "net is drawn 2 times"),
        ("moving --> cluster", "cluster --> moving", "should lead from floor to floor"),
        ("  entry -->", "  disk --> cache\n  entry -->", "should lead from floor to floor"),
        ("| `peers` |", "| `friends` |", "the table has friends"),
        ("| `base` |", "| |", "the table lacks base"),
        ("`Shard::put`, ", "", "the table does not say where Shard::put is"),
        ("Pool::commit", "Pool::finish", "native/src/pool/pool.cc defines no Pool::finish"),
        ("PageCache.fetch", "PageCache.fetched", "page_cache.py defines no PageCache.fetched"),
        ("`native/src/page/words.h`", "`native/src/page/word.h`", "word.h is not there"),
    ],
)
def test_a_page_that_is_wrong_is_found(true: str, wrong: str, seen: str) -> None:
    assert true in PAGE
    found = wrongs(PAGE.replace(true, wrong))
    assert any(seen in finding for finding in found), found


def test_a_new_room_must_be_drawn() -> None:
    picture = pictures(PAGE)[0]
    assert list(wrong_floors(picture, {**PYTHON, "attic": {"errors"}})) == [
        "attic is drawn 0 times, and is a room"
    ]
    assert list(wrong_floors(picture, {**PYTHON, "errors": {"node"}})) == [
        "errors stands on node, which is drawn above it or to its left"
    ]
