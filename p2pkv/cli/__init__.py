"""The command ``p2pkv``: one module a subcommand, each of which only reads options and prints.

What p2pkv itself raises becomes one line on stderr and exit status 1; a traceback means a bug of ours.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import typer

from p2pkv.cli import (
    announce,
    bench,
    demo,
    describe,
    doctor,
    drain,
    explain,
    keeper,
    namespace,
    node,
    prefix_index,
    status,
    top,
)
from p2pkv.errors import P2PKVError

# its options are another's to read
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    name="p2pkv",
    help="A peer-to-peer KV-cache engine for LLM serving.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("node", epilog=node.NAMES)(node.run)
app.command("keeper")(keeper.run)
app.command("settings")(describe.settings)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("prefix-index")(prefix_index.prefix_index)
app.command("explain")(explain.explain)
app.command("drain")(drain.drain)
app.command("purge")(namespace.purge)
app.add_typer(namespace.app, name="namespace")
app.command("announce")(announce.announce)
app.command("bench", add_help_option=False, context_settings=_PASS_ON)(bench.bench)
app.command("replay", add_help_option=False, context_settings=_PASS_ON)(bench.replay)
app.command("version")(describe.version)
app.command("demo", context_settings={"ignore_unknown_options": True})(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2pkv {version('p2pkv')}")
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
    try:
        app()
    except P2PKVError as error:
        typer.echo(f"p2pkv: {error}", err=True)
        sys.exit(1)
