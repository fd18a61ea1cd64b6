"""Shows the figures of a serving benchmark: tables, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2pkv_bench.serving.figures import PERCENTILES, Figures

_TIMES = (
    ("time to first token", "first_token"),
    ("between tokens", "between_tokens"),
    ("per token", "per_token"),
    ("whole answer", "whole"),
)


def show(console: Console, found: Sequence[Figures]) -> None:
    """Print everything; the first target is what the others are compared with."""
    times = Table("ms", "target", *(f"p{p}" for p in PERCENTILES), title="times", title_justify="left")
    for column in times.columns[2:]:
        column.justify = "right"
    for title, kind in _TIMES:
        for one in found:
            values = getattr(one, kind)
            times.add_row(title, one.target, *(f"{values[p] * 1e3:.2f}" for p in PERCENTILES))
        times.add_section()
    console.print(times)
    totals = Table("target", title="totals", title_justify="left")
    for name in (
        "requests",
        "errors",
        "goodput/s",
        "tokens/s",
        "hit rate",
        "sent late p99",
        "router's own",
    ):
        totals.add_column(name, justify="right")
    for one in found:
        totals.add_row(
            one.target,
            str(one.n_requests),
            str(one.n_errors),
            f"{one.goodput:.1f}",
            f"{one.tokens_per_second:.0f}",
            "-" if one.hit_rate is None else f"{one.hit_rate:.1%}",
            f"{one.late * 1e3:.2f} ms",
            _overhead(one),
        )
    console.print(totals)
    if any(one.pages for one in found):
        sources = sorted({source for one in found for source in one.pages})
        pages = Table(
            "target", *sources, title="pages of prompts, by where they came from", title_justify="left"
        )
        for one in found:
            pages.add_row(one.target, *(f"{one.pages.get(source, 0):.0f}" for source in sources))
        console.print(pages)
    _compare(console, found)


def _overhead(one: Figures) -> str:
    if not one.overhead:
        return "-"
    return f"{one.overhead['mean'] * 1e3:.2f} ms, p99 <= {one.overhead['p99_below'] * 1e3:g} ms"


def _compare(console: Console, found: Sequence[Figures]) -> None:
    base, *others = found
    for one in others:
        gaps = ", ".join(
            f"p{p} {(one.first_token[p] - base.first_token[p]) * 1e3:+.2f} ms "
            f"({one.first_token[p] / base.first_token[p]:.2f}x)"
            for p in PERCENTILES
        )
        console.print(f"time to first token of {one.target} against {base.target}: {gaps}")


def draw(found: Sequence[Figures], path: Path) -> list[Path]:
    """Draw the times as bars; write ``path`` as PNG and as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axis, (title, name) in zip(figure.subplots(1, len(_TIMES)), _TIMES, strict=True):
        width = 0.8 / len(found)
        for index, one in enumerate(found):
            heights = [getattr(one, name)[p] * 1e3 for p in PERCENTILES]
            places = [i + index * width for i in range(len(PERCENTILES))]
            axis.bar(places, heights, width, label=one.target)
        axis.set_xticks(
            [i + 0.4 - width / 2 for i in range(len(PERCENTILES))], [f"p{p}" for p in PERCENTILES]
        )
        axis.set_title(f"{title} (ms)", fontsize=9)
    figure.axes[0].legend(fontsize=8)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file)
    return written
