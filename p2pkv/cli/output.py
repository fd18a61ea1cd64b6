"""How commands print for programs: one JSON document, or a line of JSON for each of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsLines = Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON for each of its parts.")]


def print_lines(parts: Iterable[object]) -> None:
    """Print a line of JSON for each."""
    for part in parts:
        typer.echo(json.dumps(part))


def print_parts(record: Mapping[str, Any], whole: str, lists: Sequence[str]) -> None:
    """Print what a record has beside its ``lists``, named ``whole``, then each item of these, named by its list."""
    print_lines([{"part": whole, **{name: value for name, value in record.items() if name not in lists}}])
    for name in lists:
        print_lines({"part": name, **item} for item in record[name])
