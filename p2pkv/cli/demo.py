"""``p2pkv demo``: run the repository's demo, which is not part of the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer


def demo(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="Your text instead of the built-in one."),
    ] = None,
) -> None:
    """Serve two prompts with three processes that share KV pages."""
    folder = _folder()
    if folder is None:
        typer.echo(
            "p2pkv: the demo is part of the repository, not of the package; run `make demo` in a checkout",
            err=True,
        )
        raise typer.Exit(1)
    command = [sys.executable, "-m", "demo", *(arguments or ())]
    raise typer.Exit(subprocess.run(command, cwd=folder, check=False).returncode)


def _folder() -> Path | None:
    """Return the folder that holds the demo package: some other package may have that name."""
    spec = PathFinder.find_spec("demo", [os.getcwd(), *sys.path])
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / "paged_kv.py").exists():
            return Path(place).parent
    return None
