"""``p2pkv bench``: measure this machine, two processes at a time; ``p2pkv bench serving`` has options of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from p2pkv.errors import ConfigError
from p2pkv_bench import machine, plan, plot, report
from p2pkv_bench.options import names_of, numbers_of, sizes_of
from p2pkv_bench.rows import Row
from p2pkv_bench.run import measure
from p2pkv_bench.serving.cli import serving
from p2pkv_bench.working_set import working_set_nbytes


def main(arguments: Sequence[str]) -> None:
    """Run ``p2pkv bench`` with these arguments, and end the process as commands do."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if arguments[:1] == ["serving"]:
        app.command()(serving)
        app(list(arguments[1:]), prog_name="p2pkv bench serving")
    else:
        app.command()(bench)
        app(list(arguments), prog_name="p2pkv bench")


def bench(
    suite: Annotated[
        str, typer.Argument(metavar="[SUITE]", help="One suite, as --only names them.", show_default=False)
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and smaller rounds: less than a minute.")
    ] = False,
    only: Annotated[str, typer.Option(metavar="SUITES", help=f"Of {', '.join(plan.SUITES)}.")] = "",
    transport: Annotated[str, typer.Option(metavar="NAMES", help=f"Of {', '.join(plan.TRANSPORTS)}.")] = "",
    pages: Annotated[str, typer.Option(metavar="SIZES", help="Such as 64KiB,1MiB.")] = "",
    batches: Annotated[str, typer.Option(metavar="NUMBERS", help="Pages a call, such as 1,32.")] = "",
    threads: Annotated[str, typer.Option(metavar="NUMBERS", help="Threads that call, such as 1,4.")] = "",
    processes: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Node processes of the suite processes, such as 16,64.")
    ] = "",
    kept: Annotated[
        str,
        typer.Option(metavar="NUMBERS", help="Pages a keeper has, of the suite lives, such as 1000,1000000."),
    ] = "",
    members: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Members of the suites fabric and news, such as 100,1000.")
    ] = "",
    published: Annotated[
        int, typer.Option(min=1, help="Pages that the members of the suite fabric have together.")
    ] = plan.PUBLISHED,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; one more warms up.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON a row instead of tables.")
    ] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the ratios: FILE as PNG and as SVG.")
    ] = None,
) -> None:
    """Compare fetch, publish and exists with copies, raw streams and a bare echo of the same bytes.

    "p2pkv bench serving" drives OpenAI-compatible endpoints with a load instead; see its --help.
    """
    if suite and only:
        raise ConfigError("give a suite or --only, not both")
    # a file has no width: a table cut to 80 columns there would be of no use
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 190)
    progress = Console(stderr=True, highlight=False)
    chosen = _plan(quick=quick, rounds=rounds)
    chosen = replace(
        chosen,
        suites=names_of("--only", only or suite, plan.SUITES) or chosen.suites,
        transports=names_of("--transport", transport, plan.TRANSPORTS) or chosen.transports,
        chosen_transports=names_of("--transport", transport, plan.TRANSPORTS),
        pages=sizes_of("--pages", pages, chosen.working_set) or chosen.pages,
        batches=numbers_of("--batches", batches) or chosen.batches,
        threads=numbers_of("--threads", threads) or chosen.threads,
        processes=numbers_of("--processes", processes) or chosen.processes,
        kept=numbers_of("--kept", kept, most=100_000_000) or chosen.kept,
        members=numbers_of("--members", members) or chosen.members,
        published=published,
    )
    about = machine.describe()
    began = time.monotonic()
    rows: list[Row] = []
    with progress.status("starting") as status:
        chosen = replace(chosen, tell=lambda what: status.update(f"{time.monotonic() - began:.0f} s: {what}"))
        for row in measure(chosen):
            rows.append(row)
            if as_json:
                typer.echo(report.to_json(row))
    if not as_json:
        report.show(console, rows, about, chosen.working_set)
    if plot_file is not None:
        for path in plot.draw(rows, plot_file, about):
            progress.print(f"wrote {path}", markup=False)


def _plan(*, quick: bool, rounds: int) -> plan.Plan:
    whole = plan.Plan(rounds=rounds, working_set=working_set_nbytes())
    return plan.quick(whole) if quick else whole
