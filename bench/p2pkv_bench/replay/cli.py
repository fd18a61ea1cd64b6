"""``p2pkv replay TRACE``: how much memory and disk a load is worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from p2pkv.errors import ConfigError
from p2pkv.values import parse_size
from p2pkv_bench.replay.live import LiveCluster
from p2pkv_bench.replay.placement import PLACEMENTS
from p2pkv_bench.replay.report import Live, Report, draw, show, to_dict
from p2pkv_bench.replay.run import Found, Outcome, Size, beside, ceiling, simulate
from p2pkv_bench.traces import TracedRequest, read_whole_trace

_GRANULE = 4096
"""Pages take their bytes of a pool rounded up to so many."""
_LIVE_PAGE = 4096
"""Bytes of a page in real nodes: where a page is found does not depend on how long it is."""


def main(arguments: Sequence[str]) -> None:
    """Run ``p2pkv replay`` with these arguments, and end the process as commands do."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(replay)
    app(list(arguments), prog_name="p2pkv replay")


def replay(
    trace: Annotated[Path, typer.Argument(help="A line of JSON a request: hash_ids and timestamp (ms).")],
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="How many share their pages.")] = 1,
    pool_size: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each.")] = "64GiB",
    disk_size: Annotated[str, typer.Option(metavar="SIZE", help="Disk of each; 0: none.")] = "0",
    page_size: Annotated[str, typer.Option(metavar="SIZE", help="Of one page of the trace.")] = "4.5MiB",
    placed: Annotated[
        str, typer.Option("--placement", metavar="NAME", help=f"Of {', '.join(PLACEMENTS)}.")
    ] = "round_robin",
    sizes: Annotated[
        str, typer.Option(metavar="FACTORS", help="Memory and disk to try, as parts of what was given.")
    ] = "0.25,0.5,1,2,4",
    windows: Annotated[int, typer.Option(min=1, max=1000, help="Stretches of time to tell apart.")] = 8,
    live: Annotated[
        bool, typer.Option("--live", help="Send the requests to real nodes as well, with small pages.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: FILE as PNG and as SVG.")
    ] = None,
) -> None:
    """Simulate what the requests of a trace would find in a cluster: by tier, over its size, and over time."""
    requests = read_whole_trace(trace)
    page_nbytes = parse_size("--page-size", page_size)
    given = Size(
        nodes,
        _n_pages("--pool-size", pool_size, page_nbytes, least=1),
        _n_pages("--disk-size", disk_size, page_nbytes, least=0),
    )
    factors = sorted({*_factors(sizes), 1.0})
    outcomes = {factor: simulate(requests, _scaled(given, factor), placed, windows) for factor in factors}
    report = Report(
        trace=trace.name,
        n_requests=len(requests),
        placement=placed,
        page_nbytes=page_nbytes,
        ceiling=ceiling(requests),
        sizes=list(outcomes.values()),
        asked_for=outcomes[1.0],
        seconds=(requests[-1].timestamp - requests[0].timestamp) / 1000,
        live=_live(requests, outcomes[1.0], placed) if live else None,
    )
    if as_json:
        print(json.dumps(to_dict(report)))
    else:
        # a file has no width: a table cut to 80 columns there would be of no use
        show(Console(highlight=False, width=None if sys.stdout.isatty() else 120), report)
    if plot_file is not None:
        for written in draw(report, plot_file):
            Console(stderr=True, highlight=False).print(Text(f"wrote {written}"))


def _live(requests: Sequence[TracedRequest], outcome: Outcome, placed: str) -> Live:
    longest = max(1, *(len(request.hash_ids) for request in requests))
    with LiveCluster(outcome.size, _LIVE_PAGE, longest) as cluster:
        simulated, found = beside(requests, outcome.size, placed, cluster)
        return Live(simulated, Found(found.n_asked, cluster.by_tier()))


def _n_pages(option: str, text: str, page_nbytes: int, *, least: int) -> int:
    if page_nbytes < 1:
        raise ConfigError(f"--page-size must be at least a byte, and is {page_nbytes}")
    n_pages = parse_size(option, text) // (-(-page_nbytes // _GRANULE) * _GRANULE)
    if n_pages < least:
        raise ConfigError(f"{option} {text} has no room for a page of {page_nbytes} bytes")
    return n_pages


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--sizes takes numbers such as 0.5,1,2; not {text!r}") from error
    if not all(0 < factor < 1e6 for factor in factors):
        raise ConfigError(f"--sizes takes numbers above 0; not {text!r}")
    return factors


def _scaled(size: Size, factor: float) -> Size:
    return Size(size.n_nodes, max(1, int(size.pool_pages * factor)), int(size.disk_pages * factor))
