"""A run as people read it, and as programs do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pkv_bench.rows import KIB, MIB, Reference, Row, Spread


def to_json(row: Row) -> str:
    """Return a row as one line of JSON."""
    return json.dumps(dataclasses.asdict(row) | {"judged": row.judged, "is_met": row.is_met})


def show(console: Console, rows: Sequence[Row], machine: Mapping[str, object], working_set: int) -> None:
    """Print a table a suite, and what fell short."""
    console.print(Text(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim"))
    console.print(
        Text(
            f"Source and destination are cold: pages rotate over {working_set // MIB} MiB on either side. A reference "
            "shows its median, ours divided by it round by round (median and [least..greatest]), and our best round "
            "divided by its best. Every page that moved was verified.",
            style="dim",
        )
    )
    for suite in dict.fromkeys(row.suite for row in rows):
        console.print(_table(suite, [row for row in rows if row.suite == suite]))
    judged = [row for row in rows if row.is_met is not None]
    n_met = sum(row.is_met is True for row in judged)
    if judged:
        console.print(Text(f"{n_met} of {len(judged)} targets met", style="bold"))


def _table(suite: str, rows: Sequence[Row]) -> Table:
    table = Table(title=suite, title_justify="left", show_edge=False, pad_edge=False)
    names = list(dict.fromkeys(reference.name for row in rows for reference in row.references))
    has_pages, has_batches = any(row.page_nbytes for row in rows), any(row.batch for row in rows)
    for column in ("case", *["pages"] * has_pages):
        table.add_column(column)
    subjects = {row.subject for row in rows}
    subject = subjects.pop() if len(subjects) == 1 else "measured"
    for column in (*["a call"] * has_batches, "threads", subject):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"of {name}", justify="right")
    table.add_column("target", justify="right")
    for row in rows:
        by_name = {reference.name: reference for reference in row.references}
        table.add_row(
            f"{row.transport}: {row.case}" if row.transport else row.case,
            *[page_size(row.page_nbytes) if row.page_nbytes else ""] * has_pages,
            *[str(row.batch or "")] * has_batches,
            str(row.threads),
            _figure(row.value, row.unit),
            *(_compared(by_name[name]) if name in by_name else "" for name in names),
            _verdict(row),
        )
    return table


def _figure(value: Spread, unit: str) -> str:
    return f"{short(value.median)} {unit}"


def _compared(reference: Reference) -> str:
    ratio = reference.ratio
    spread = f"{ratio.median:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"
    return f"{short(reference.value.median)}: {spread} {reference.best:.2f}"


def _verdict(row: Row) -> Text:
    if row.target is None:
        return Text("")
    sign = "<=" if row.target.at_most else ">="
    met = row.is_met
    return Text(
        f"{sign} {row.target.bound:g} {'met' if met else 'falls short'}", style="green" if met else "red"
    )


def short(value: float) -> str:
    """Return a figure with as many digits as mean something."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def page_size(nbytes: int) -> str:
    """Return a size as people say it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes * 4 % unit == 0:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
