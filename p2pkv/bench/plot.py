"""Ratios over page sizes, as a picture. matplotlib is the optional extra ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from p2pkv.bench.errors import BenchError
from p2pkv.bench.report import page_size
from p2pkv.bench.rows import Row


def unavailable() -> str | None:
    """Return None, or one sentence saying what is missing."""
    if find_spec("matplotlib") is None:
        return "plots need matplotlib; pip install 'p2pkv[bench]'"
    return None


def draw(rows: Sequence[Row], file: Path) -> list[Path]:
    """Draw fetches and publishes of one thread against their first reference; write a PNG and an SVG."""
    missing = unavailable()
    if missing is not None:
        raise BenchError(missing)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.suite in ("fetch", "publish") and row.threads == 1 and row.references:
            name = " ".join(part for part in (row.suite, row.transport, row.case) if part)
            lines.setdefault(f"{name}, {row.batch} a call / {row.references[0].name}", []).append(row)
    for name, points in sorted(lines.items()):
        ratios = [point.references[0].ratio for point in points]
        sizes = [float(point.page_nbytes) for point in points]
        axes.plot(sizes, [ratio.median for ratio in ratios], marker="o", label=name)
        axes.fill_between(sizes, [r.low for r in ratios], [r.high for r in ratios], alpha=0.12)
    ticks = sorted({row.page_nbytes for points in lines.values() for row in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [page_size(nbytes) for nbytes in ticks])
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_xlabel("page size")
    axes.set_ylabel("ratio to the reference of the same bytes")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")
    figure.tight_layout()
    written = [file.with_suffix(".png"), file.with_suffix(".svg")]
    for path in written:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return written
