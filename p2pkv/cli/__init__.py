"""The command ``p2pkv``: one module a subcommand, each of which only reads options and prints.

A subcommand's module, and what that needs, is imported when it is called, or when all are shown: importing all of them
would take longer than most of them do.

What p2pkv itself raises becomes one line on stderr and exit status 1; a traceback means a bug of ours.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from p2pkv.errors import P2PKVError


class _Place(NamedTuple):
    """Where a subcommand is: a function, or the commands of an own ``Typer``, of a module of this package."""

    module: str
    name: str
    options: Mapping[str, Any] = {}
    """What :meth:`typer.Typer.command` is given."""
    epilog: str = ""
    """The name, in that module, of what its help ends with."""


# its options are another's to read
_PASS_ON = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
_PLACES = {
    "doctor": _Place("doctor", "doctor"),
    "node": _Place("node", "run", epilog="NAMES"),
    "keeper": _Place("keeper", "run"),
    "settings": _Place("describe", "settings"),
    "status": _Place("status", "status"),
    "top": _Place("top", "top"),
    "prefix-index": _Place("prefix_index", "prefix_index"),
    "explain": _Place("explain", "explain"),
    "drain": _Place("drain", "drain"),
    "purge": _Place("namespace", "purge"),
    "announce": _Place("announce", "announce"),
    "bench": _Place("bench", "bench", _PASS_ON),
    "replay": _Place("bench", "replay", _PASS_ON),
    "version": _Place("describe", "version"),
    "demo": _Place("demo", "demo", {"context_settings": {"ignore_unknown_options": True}}),
    "namespace": _Place("namespace", "app"),
}


class _Imported(Mapping[str, Any]):
    """The subcommands by name; whose is asked for, is imported."""

    def __getitem__(self, name: str) -> Any:
        place = _PLACES[name]
        module = import_module(f"p2pkv.cli.{place.module}")
        if not gc.isenabled():  # `main` has put it off
            gc.freeze()
            gc.enable()
        found = getattr(module, place.name)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        epilog = getattr(module, place.epilog) if place.epilog else None
        alone.command(name, epilog=epilog, **place.options)(found)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


class _Commands(TyperGroup):
    """The command ``p2pkv`` with its subcommands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported()  # type: ignore[assignment]  # nobody adds to them


app = typer.Typer(
    name="p2pkv",
    cls=_Commands,
    help="A peer-to-peer KV-cache engine for LLM serving.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2pkv {import_module('importlib.metadata').version('p2pkv')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Start nodes, look at them, and measure."""


def main() -> None:
    """Run the command line."""
    # What is imported is there to stay: to look through it for garbage takes a tenth of that time.
    gc.disable()
    try:
        app()
    except P2PKVError as error:
        typer.echo(f"p2pkv: {error}", err=True)
        sys.exit(1)
    finally:
        gc.enable()
