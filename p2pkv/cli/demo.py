"""``p2pkv demo``: run the demo, from the checkout that this p2pkv is of, or from what was installed with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

_ROOT = Path(__file__).parents[2]
"""It has this package, and in a checkout the demo beside it."""
_INSTALLED = "p2pkv_demo"
"""A wheel has the demo in this folder beside the package: `demo` is everybody's name."""


def demo(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="Your text instead of the built-in one."),
    ] = None,
) -> None:
    """Serve two prompts with three processes that share KV pages."""
    folder = _folder(_ROOT)
    if folder is None:
        typer.echo(
            "p2pkv: the demo was not installed with this package; run `make demo` in a checkout", err=True
        )
        raise typer.Exit(1)
    command = [sys.executable, "-m", "demo", *(arguments or ())]
    raise typer.Exit(subprocess.run(command, cwd=folder, check=False).returncode)


def _folder(root: Path) -> Path | None:
    """Return the folder that holds the demo, None if there is none."""
    places = (root, root / _INSTALLED)
    return next((place for place in places if (place / "demo" / "paged_kv.py").exists()), None)
