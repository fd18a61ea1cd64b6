"""``p2pkv settings`` and ``p2pkv version``: what a node can be told, and what is installed."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version as version_of
from typing import Annotated

import typer
from rich.text import Text

from p2pkv.cli.output import AsJson, AsLines, print_lines
from p2pkv.cli.tables import console
from p2pkv.config.described import Setting, described


def settings(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Those to show; all by default.")
    ] = None,
    as_json: AsJson = False,
    as_lines: AsLines = False,
) -> None:
    """Show every setting of a node: its name, its default and what it means.

    They are given by --set NAME=VALUE, as JSON by --config FILE, or by the environment as P2PKV_NAME.
    """
    shown = described(names)
    if as_json:
        typer.echo(json.dumps({"settings": [_record(setting) for setting in shown]}))
    elif as_lines:
        print_lines(_record(setting) for setting in shown)
    else:
        _show(shown)


def version(as_json: AsJson = False, as_lines: AsLines = False) -> None:
    """Show the versions of p2pkv, of Python and of the machine's kind."""
    installed = {
        "p2pkv": version_of("p2pkv"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if as_json or as_lines:
        typer.echo(json.dumps(installed))
    else:
        typer.echo(f"p2pkv {installed['p2pkv']}, Python {installed['python']}, {installed['machine']}")


def _record(setting: Setting) -> dict[str, str]:
    return {
        "name": setting.name,
        "default": setting.default,
        "variable": setting.variable,
        "meaning": setting.meaning,
    }


def _show(shown: list[Setting]) -> None:
    printer = console()
    for setting in shown:
        default = f" = {setting.default}" if setting.default else ""
        printer.print(Text.assemble((setting.name, "bold"), default))
        text = " ".join(setting.meaning.replace("``", "").split())
        printer.print(Text(f"    {text}"))
