"""Figures over page sizes, as a picture."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2pkv_bench.report import page_size
from p2pkv_bench.rows import Row, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row], file: Path, about: Mapping[str, object]) -> list[Path]:
    """Draw what the rows of one thread say over page sizes; write a PNG and an SVG.

    Fetches and publishes as ratios to their first reference; transports side by side as throughput, and as how long
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
    panels = [
        (ratios, "ratio to the reference of the same bytes", _ratio, _ratio_name),
        (throughput, "GB/s, validated", _value, _name),
        (latency, "microseconds a call", _value, _name),
    ]
    drawn = [panel for panel in panels if panel[0]]
    figure, axes = plt.subplots(max(1, len(drawn)), figsize=(9, 5.5 * max(1, len(drawn))), squeeze=False)
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
        if points is ratios:
            axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.legend(fontsize="x-small")
    day = time.strftime("%Y-%m-%d")
    figure.suptitle(f"{about['cpu']}, {about['cores']} cores, load {about['load']}, {day}", fontsize="small")
    return save(figure, file)


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
    return f"{name}, {row.batch} a call / {row.references[0].name}"
