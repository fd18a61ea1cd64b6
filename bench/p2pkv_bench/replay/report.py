"""Replays as people read them, and as programs do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pkv_bench.plot import save
from p2pkv_bench.replay.run import Found, Outcome
from p2pkv_bench.replay.simulation import Tier
from p2pkv_bench.report import page_size

_NAMES = {
    Tier.OWN_MEMORY: "own memory",
    Tier.PEER_MEMORY: "peers' memory",
    Tier.OWN_DISK: "own disk",
    Tier.PEER_DISK: "peers' disk",
}


class Live(NamedTuple):
    """Compares what real nodes found with the simulation of the same."""

    simulated: Found
    found: Found


class Report(NamedTuple):
    """All that ``p2pkv replay`` found out."""

    trace: str
    n_requests: int
    placement: str
    page_nbytes: int
    ceiling: float
    sizes: list[Outcome]
    """Smallest first."""
    asked_for: Outcome
    """The one of the size that was given."""
    seconds: float
    """How long the trace's requests took to come."""
    live: Live | None


def to_dict(report: Report) -> dict[str, object]:
    """Return the report for JSON: sizes in bytes a node, rates between 0 and 1."""
    live = report.live
    return {
        "trace": report.trace,
        "requests": report.n_requests,
        "pages": report.asked_for.total.n_asked,
        "placement": report.placement,
        "page_size": report.page_nbytes,
        "ceiling": report.ceiling,
        "sizes": [_size(outcome, report.page_nbytes) for outcome in report.sizes],
        "windows": [
            {"from": begin, "to": end} | _found(found)
            for (begin, end), found in zip(_stretches(report), report.asked_for.windows, strict=True)
        ],
        "live": None if live is None else {"simulated": _found(live.simulated), "found": _found(live.found)},
    }


def show(console: Console, report: Report) -> None:
    """Print a table over sizes, one over time, and what real nodes say to it."""
    pages = report.asked_for.total.n_asked
    console.print(
        Text(
            f"{report.n_requests:,} requests for {pages:,} pages of {page_size(report.page_nbytes)}, placed by "
            f"{report.placement}; a cluster that never evicts finds {report.ceiling:.1%}."
        )
    )
    console.print(_table_of_sizes(report))
    if len(report.asked_for.windows) > 1:
        console.print(_table_of_windows(report))
    if report.live is not None:
        console.print(_table_of_live(report.live))


def draw(report: Report, file: Path) -> list[Path]:
    """Draw the hit rate over the size and over time, by tier; write a PNG and an SVG."""
    # half a second that a run without a plot need not wait
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (over_size, over_time) = plt.subplots(2, figsize=(9, 9))
    gib = [outcome.size.pool_pages * report.page_nbytes / 2**30 for outcome in report.sizes]
    names = list(_NAMES.values())
    over_size.stackplot(gib, _stacked([outcome.total for outcome in report.sizes]), labels=names, alpha=0.8)
    over_size.axhline(report.ceiling, color="gray", linewidth=0.8, linestyle="--", label="never evicts")
    over_size.set_xscale("log", base=2)
    over_size.set_xlabel("memory a node, GiB")
    middles = [(begin + end) / 2 / 60 for begin, end in _stretches(report)]
    over_time.stackplot(middles, _stacked(report.asked_for.windows), labels=names, alpha=0.8)
    over_time.set_xlabel("minutes into the trace")
    for axis in (over_size, over_time):
        axis.set_ylabel("pages found")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="x-small")
    return save(figure, file)


def _table_of_sizes(report: Report) -> Table:
    table = _table(
        "memory and disk of each node",
        "memory",
        "disk",
        "found",
        *_NAMES.values(),
        "of the ceiling",
        "evicted",
    )
    for outcome in report.sizes:
        size, total = outcome.size, outcome.total
        table.add_row(
            _gib(size.pool_pages * report.page_nbytes),
            _gib(size.disk_pages * report.page_nbytes) if size.disk_pages else "-",
            f"{total.rate:.1%}",
            *(f"{total.share(tier):.1%}" for tier in Tier),
            f"{total.rate / report.ceiling:.0%}" if report.ceiling else "-",
            f"{outcome.n_evicted:,}",
            style="bold" if outcome.size == report.asked_for.size else None,
        )
    return table


def _table_of_windows(report: Report) -> Table:
    memory = _gib(report.asked_for.size.pool_pages * report.page_nbytes)
    table = _table(f"over time, with {memory} a node", "minutes", "pages", "found", *_NAMES.values())
    for (begin, end), found in zip(_stretches(report), report.asked_for.windows, strict=True):
        shares = (f"{found.share(tier):.1%}" for tier in Tier)
        table.add_row(
            f"{begin / 60:.1f} to {end / 60:.1f}", f"{found.n_asked:,}", f"{found.rate:.1%}", *shares
        )
    return table


def _table_of_live(live: Live) -> Table:
    table = _table("the same requests to real nodes", "", "found", "own memory", "peers", "own disk")
    for name, found in (("simulated", live.simulated), ("real", live.found)):
        peers = found.share(Tier.PEER_MEMORY) + found.share(Tier.PEER_DISK)
        shares = (found.rate, found.share(Tier.OWN_MEMORY), peers, found.share(Tier.OWN_DISK))
        table.add_row(name, *(f"{share:.1%}" for share in shares))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def _stacked(found: Sequence[Found]) -> list[list[float]]:
    return [[one.share(tier) for one in found] for tier in Tier]


def _stretches(report: Report) -> list[tuple[float, float]]:
    n = len(report.asked_for.windows)
    return [(i * report.seconds / n, (i + 1) * report.seconds / n) for i in range(n)]


def _size(outcome: Outcome, page_nbytes: int) -> dict[str, object]:
    size = outcome.size
    return {
        "nodes": size.n_nodes,
        "pool_size": size.pool_pages * page_nbytes,
        "disk_size": size.disk_pages * page_nbytes,
        "evicted": outcome.n_evicted,
    } | _found(outcome.total)


def _found(found: Found) -> dict[str, object]:
    shares = {tier.name.lower(): found.share(tier) for tier in Tier}
    return {"pages": found.n_asked, "rate": found.rate, **shares}
