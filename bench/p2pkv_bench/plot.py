"""Figures over page sizes, as a picture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2pkv_bench.report import page_size
from p2pkv_bench.rows import Row, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row], file: Path, about: Mapping[str, object]) -> list[Path]:
    """Draw what the rows of one thread say over page sizes, and how all rows stand to their targets; write PNG and SVG.

    Fetches and publishes as ratios, with an axis for each first reference; transports as throughput, and as how long
    single calls took. The machine that ``about`` describes is the title, with the day.
    """
    # half a second that a run without a plot need not wait
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    single = [row for row in rows if row.threads == 1 and row.page_nbytes]
    ratios = [row for row in single if row.suite in ("fetch", "publish") and row.references]
    throughput = [row for row in single if row.suite == "transports" and row.unit == "GB/s"]
    latency = [row for row in single if row.suite == "transports" and row.unit == "us"]
    references = dict.fromkeys(row.references[0].name for row in ratios)
    panels = [
        *(
            ([row for row in ratios if row.references[0].name == name], f"of {name}", _ratio, _ratio_name)
            for name in references
        ),
        (throughput, "GB/s, validated", _value, _name),
        (latency, "microseconds a call", _value, _name),
    ]
    drawn = [panel for panel in panels if panel[0]]
    judged = [row for row in rows if row.judged is not None]
    heights = [5.5] * len(drawn) + ([1.0 + 0.25 * len(judged)] if judged else [])
    heights = heights or [5.5]
    figure, axes = plt.subplots(len(heights), figsize=(9, sum(heights)), squeeze=False, height_ratios=heights)
    for axis, (points, label, value_of, name_of) in zip(axes[:, 0], drawn, strict=False):
        lines: dict[str, list[Row]] = {}
        for row in points:
            lines.setdefault(name_of(row), []).append(row)
        for name, line in sorted(lines.items()):
            values = [value_of(row) for row in line]
            sizes = [float(row.page_nbytes) for row in line]
            axis.plot(sizes, [value.median for value in values], marker="o", label=name)
            axis.fill_between(sizes, [v.low for v in values], [v.high for v in values], alpha=0.12)
        ticks = sorted({row.page_nbytes for row in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [page_size(nbytes) for nbytes in ticks])
        axis.set_xlabel("page size")
        axis.set_ylabel(label)
        if points is latency:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        if value_of is _ratio:
            axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.legend(fontsize="x-small")
    if judged:
        _draw_targets(axes[-1, 0], judged)
    day = time.strftime("%Y-%m-%d")
    figure.suptitle(f"{about['cpu']}, {about['cores']} cores, load {about['load']}, {day}", fontsize="small")
    return save(figure, file)


def _draw_targets(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar a row: how often it has what its target asks for; 1 and more meets it, whichever way it is asked."""
    names = [" ".join(filter(None, (row.suite, row.transport, row.case, _size(row)))) for row in rows]
    shares = [_share_of_target(row) for row in rows]
    colors = ["tab:green" if row.is_met else "tab:red" for row in rows]
    places = range(len(rows))
    axis.barh(places, shares, color=colors, height=0.6)
    axis.set_yticks(places, names, fontsize="x-small")
    axis.invert_yaxis()
    axis.axvline(1.0, color="gray", linewidth=0.8)
    axis.set_xlabel("of what the target asks for; 1 and more meets it")


def _share_of_target(row: Row) -> float:
    """Return how far a row that has a target is on the right side of it."""
    assert row.target is not None
    judged = row.judged or 0.0
    if row.target.at_most:
        return row.target.bound / judged if judged else 1.0
    return judged / row.target.bound


def _size(row: Row) -> str:
    return f"{row.batch} x {page_size(row.page_nbytes)}" if row.page_nbytes else ""


def save(figure: Figure, file: Path) -> list[Path]:
    """Write a figure of pyplot's as PNG and as SVG, and close it; return both paths."""
    from matplotlib import pyplot as plt

    figure.tight_layout()
    written = [file.with_suffix(".png"), file.with_suffix(".svg")]
    for path in written:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return written


def _value(row: Row) -> Spread:
    return row.value


def _ratio(row: Row) -> Spread:
    return row.references[0].ratio


def _name(row: Row) -> str:
    return f"{row.transport} {row.case}, {row.batch} a call"


def _ratio_name(row: Row) -> str:
    name = " ".join(part for part in (row.suite, row.transport, row.case) if part)
    return f"{name}, {row.batch} a call"
