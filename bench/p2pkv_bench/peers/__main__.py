"""``make bench-peers``: what other systems do with the same pages in the same run, and why some don't."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from p2pkv.errors import P2PKVError
from p2pkv_bench import machine
from p2pkv_bench.options import names_of, numbers_of, sizes_of
from p2pkv_bench.peers import alone, moving, report
from p2pkv_bench.peers.entrants import Entrant, Tell
from p2pkv_bench.peers.systems import OWN, SYSTEMS, System
from p2pkv_bench.plan import Plan
from p2pkv_bench.report import to_json
from p2pkv_bench.rows import KIB, MIB, Row
from p2pkv_bench.working_set import working_set_nbytes

PARTS = ("fetch", "room", "start")
_WORKING_SETS = 20
"""Two of p2pkv's pairs have nine together, the six other systems' processes eleven with their pools."""


_entered: list[Entrant] = []
"""They live until this process ends."""


def main() -> None:
    """Run the command, and end the process whatever the other systems' threads do."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(peers)
    status = 1
    try:
        app(prog_name="python -m p2pkv_bench.peers")
    except P2PKVError as error:
        print(f"p2pkv: {error}", file=sys.stderr)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    # their order of destruction is not ours to wait for
    os._exit(status)


def peers(
    only: Annotated[str, typer.Option(metavar="PARTS", help=f"Of {', '.join(PARTS)}.")] = "",
    systems: Annotated[
        str,
        typer.Option(metavar="NAMES", help=f"Of {', '.join(system.name for system in SYSTEMS)}."),
    ] = "",
    pages: Annotated[str, typer.Option(metavar="SIZES", help="Such as 64KiB,1MiB.")] = "",
    batches: Annotated[str, typer.Option(metavar="NUMBERS", help="Pages a call, such as 32.")] = "",
    threads: Annotated[str, typer.Option(metavar="NUMBERS", help="Threads that fetch, such as 1,4.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; one more warms up.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON a row instead of tables.")
    ] = False,
) -> None:
    """Compare p2pkv with other systems: pages fetched, usable share of memory, time to start."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 190)
    progress = Console(stderr=True, highlight=False)
    working_set = working_set_nbytes(_WORKING_SETS)
    plan = Plan(
        pages=sizes_of("--pages", pages, working_set) or (64 * KIB, 256 * KIB, MIB),
        batches=numbers_of("--batches", batches) or (32, 128),
        threads=numbers_of("--threads", threads) or (1, 4),
        rounds=rounds,
        working_set=working_set,
        tell=lambda what: progress.print(Text(what, style="dim")),
    )
    names = names_of("--systems", systems, [system.name for system in SYSTEMS])
    chosen = [system for system in SYSTEMS if not names or system.name in names]
    said: list[str] = []
    rows: list[Row] = []
    for row in measure(plan, names_of("--only", only, PARTS) or PARTS, chosen, said.append, _entered):
        rows.append(row)
        if as_json:
            typer.echo(to_json(row))
    if as_json:
        for sentence in said:
            progress.print(Text(sentence, style="yellow"))
    else:
        about = machine.describe() | {"systems": ", ".join(_about(system) for system in (OWN[0], *chosen))}
        report.show(console, rows, about, working_set, said)


def measure(
    plan: Plan, parts: Sequence[str], systems: Sequence[System], say: Tell, entered: list[Entrant]
) -> Iterator[Row]:
    """Yield each row as soon as it is known; ``say`` is told in a sentence what can't be had here."""
    if "room" in parts:
        yield from alone.room_rows(plan, systems, say)
    if "start" in parts:
        yield from alone.start_rows(plan, systems, say)
    if "fetch" in parts:  # at the end: from here on this process has all libraries and their threads
        yield from moving.rows(plan, systems, say, entered)


def _about(system: System) -> str:
    try:
        return system.about
    except PackageNotFoundError:
        return f"{system.name} (not installed)"


if __name__ == "__main__":
    main()
