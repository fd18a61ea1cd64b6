"""The comparison as people read it: figures of all systems beside each other, then p2pkv's ratio to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pkv_bench import report
from p2pkv_bench.peers.alone import ROOM, START
from p2pkv_bench.peers.moving import CASE
from p2pkv_bench.peers.systems import OURS
from p2pkv_bench.rows import MIB, Row, Spread

Lines = dict[tuple[int, int], dict[str, str]]
"""What stands in a table, by page size and batch, and by the name of the column."""

_LEGEND = (
    "Figures are medians of the rounds. A ratio is p2pkv's figure divided by the other's of the same round: median and "
    "[least..greatest]. Every page that moved was verified; what is not there is said below."
)


def show(
    console: Console, rows: Sequence[Row], about: Mapping[str, object], working_set: int, said: Sequence[str]
) -> None:
    """Print the tables, the targets, and what was left out."""
    console.print(Text(", ".join(f"{name} {value}" for name, value in about.items()), style="dim"))
    console.print(Text(f"{_LEGEND} Pages rotate over {working_set // MIB} MiB on either side.", style="dim"))
    for title, lines in _tables(rows):
        console.print(Text(title, style="bold"))  # a table's own title would be as narrow as the table
        console.print(_table(lines))
    for row in rows:
        if row.target is not None:
            console.print(_verdict(row))
    for sentence in said:
        console.print(Text(sentence, style="yellow"))


def _tables(rows: Sequence[Row]) -> Iterator[tuple[str, Lines]]:
    moved = [row for row in rows if row.case == CASE]
    for threads in dict.fromkeys(row.threads for row in moved):
        part = [row for row in moved if row.threads == threads]
        how = "one thread" if threads == 1 else f"{threads} threads, a reader of the other systems for each"
        yield f"GB/s, {how}", _side_by_side(part)
        for transport in dict.fromkeys(row.transport for row in part):
            ours = [row for row in part if row.transport == transport]
            yield f"p2pkv over {transport} as a multiple of each, {how}", _ratios(ours)
    room = f"{ROOM}: bytes of the pages that are there, divided by the pool's"
    for case, title in ((ROOM, room), (START, f"milliseconds to {START}")):
        part = [row for row in rows if row.case == case]
        if part:
            yield title, _side_by_side(part)


def _side_by_side(rows: Sequence[Row]) -> Lines:
    """Figures: p2pkv's over either transport, and what is the same beside both."""
    lines: Lines = {}
    for row in rows:
        line = lines.setdefault((row.page_nbytes, row.batch), {})
        line[f"{OURS} {row.transport}".strip()] = report.short(row.value.median)
    for row in rows:
        for reference in row.references:
            lines[row.page_nbytes, row.batch][reference.name] = report.short(reference.value.median)
    return lines


def _ratios(rows: Sequence[Row]) -> Lines:
    return {
        (row.page_nbytes, row.batch): {
            reference.name: _spread(reference.ratio) for reference in row.references
        }
        for row in rows
    }


def _table(lines: Lines) -> Table:
    """A line for each page size and batch, a column for each name; columns that nothing is in are left away."""
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    table = Table(show_edge=False, pad_edge=False)
    has_pages, has_batches = (any(case[i] for case in lines) for i in (0, 1))
    for column in (*["pages"] * has_pages, *["a call"] * has_batches, *names):
        table.add_column(column, justify="right")
    for (page_nbytes, batch), line in lines.items():
        case = (*[report.page_size(page_nbytes)] * has_pages, *[str(batch)] * has_batches)
        table.add_row(*case, *(line.get(name, "-") for name in names))
    return table


def _spread(ratio: Spread) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"


def _verdict(row: Row) -> Text:
    assert row.target is not None
    of = f" of {row.target.reference}" if row.target.reference else ""
    case = f"{row.case} over {row.transport}" if row.transport else row.case
    size = (
        f"{row.batch} x {report.page_size(row.page_nbytes)}"
        if row.batch
        else report.page_size(row.page_nbytes)
    )
    return Text(
        f"{case}, {size}: {report.short(row.judged or 0.0)}{of}, at least {row.target.bound:g} is wanted: "
        f"{'met' if row.is_met else 'falls short'}",
        style="green" if row.is_met else "red",
    )
