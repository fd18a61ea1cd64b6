"""What the demo shows: who took part, what moved where and how fast, and what was gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from demo import engine, messages
from demo.model import PAGE, Shape, Tokens, decode
from demo.served import Answered, Served, Survived

MIB = 1 << 20


class Report:
    """Writes to one console."""

    def __init__(self, console: Console) -> None:
        """Write to ``console``."""
        self._console = console

    def prompt(self, asked: bytes, used: bytes) -> None:
        """Show the prompt, and whether all of it is used."""
        text = used.decode(errors="replace")
        shown = text if len(text) <= 240 else f"{text[:160]} [...] {text[-60:]}"
        self._print(Text("prompt 1: ", style="bold").append(repr(shown), style="not bold cyan"))
        if len(used) < len(asked):
            self._warn(
                f"  it has {len(asked):,} bytes; the demo uses the first {len(used):,} and cuts the rest"
            )
        self._print(
            f"  {_count(len(used), 'byte')} and a begin token; {PAGE} tokens a page,"
            f" {Shape().page_nbytes / MIB:g} MiB of KV a page"
        )

    def follow_up(self, text: bytes, n_known: int) -> None:
        """Show how the second prompt continues the first."""
        self._print(
            Text("prompt 2: ", style="bold").append(f"prompt 1 and {text.decode()!r}", style="not bold cyan")
        )
        if n_known:
            self._print(
                f"  its first {n_known} tokens are prompt 1's {_count(n_known // PAGE, 'whole page')}"
            )
        else:
            self._warn(f"  prompt 1 is shorter than a page of {PAGE} tokens: there is no KV to reuse")

    def members(self, members: Sequence[messages.Member]) -> None:
        """Show who takes part."""
        table = _table("members", "node", "state", "address", "transports")
        for member in members:
            table.add_row(member.node_id, member.state, member.address, member.transports)
        self._print(table)

    def attached(self, engine_name: str, host_node: str) -> None:
        """Say whose pool an engine uses that is no member."""
        self._print(
            f"  {engine_name} is attached to {host_node}: that node's pool is its own, and outlives it\n"
        )

    @contextmanager
    def progress(self, who: str) -> Iterator[engine.Progress]:
        """Show a bar while the block runs; gives the callable that moves it."""
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(f"{who:<38}", total=None, what="")

            def move(what: str, n_done: int, n_all: int) -> None:
                bar.update(task, what=what, completed=n_done, total=n_all)

            yield move
            if bar.tasks[0].total is None:
                move("nothing to do: no whole page", 0, 0)

    def served(self, served: Served) -> None:
        """Show how one prompt was served."""
        prefilled, generated = served.prefilled.result, served.generated.result
        published = f"{prefilled.n_published * Shape().page_nbytes / MIB:g} MiB"
        self._print(
            f"  {served.prefill_node}: reused {_count(prefilled.n_reused, 'token')}, computed"
            f" {prefilled.n_computed:,}, published {_count(prefilled.n_published, 'page')} ({published})"
        )
        self._print(
            f"  {served.decode_node}: reused {_count(generated.n_reused, 'token')}, computed"
            f" {generated.n_computed}, generated {len(generated.tokens)}"
        )
        self._moved(
            [*_ways(served.prefill_node, served.prefilled), *_ways(served.decode_node, served.generated)]
        )
        self._compared(served)

    def survived(self, survived: Survived) -> None:
        """Show what the successor of the engine that was killed made of its pages."""
        generated, name = survived.generated.result, survived.engine_name
        self._print(
            f"  {name}, started anew: reused {_count(generated.n_reused, 'token')} that its predecessor computed,"
            f" computed {generated.n_computed}, first token after {_ms(generated.first_token_seconds)}"
            f" ({_ms(survived.alone.first_token_seconds)} without p2pkv)"
        )
        self._moved(_ways(name, survived.generated))
        self._compared(survived)

    def _compared(self, answered: Answered) -> None:
        generated = answered.generated.result
        self._output("with p2pkv", generated.tokens)
        self._output("one process alone", answered.alone.tokens)
        kv = generated.n_reused // PAGE * Shape().page_nbytes / MIB
        for is_same, what in (
            (answered.has_same_tokens, f"output, token for token ({len(generated.tokens)} tokens)"),
            (answered.has_same_kv, f"KV, bit for bit ({kv:g} MiB fetched)"),
        ):
            self._print(
                f"  [bold green]✓ same {what}[/]" if is_same else f"  [bold red]✗ not the same {what}[/]"
            )
        self._print("")

    def summary(self, all_served: Sequence[Served], seconds: float) -> None:
        """Show what p2pkv gained."""
        table = _table(
            "time to first token",
            "",
            "without p2pkv",
            "with p2pkv",
            "gain",
            "decode node's part",
            "gain",
            n_text=1,
        )
        for served in all_served:
            alone = served.alone.first_token_seconds
            decode_node = served.generated.result.first_token_seconds
            shared = served.prefill_seconds + decode_node
            table.add_row(
                served.request.name,
                _ms(alone),
                _ms(shared),
                f"{alone / shared:.1f}x",
                _ms(decode_node),
                f"{alone / decode_node:.1f}x",
            )
        self._print(table)
        self._print(
            "[dim]Without p2pkv the decode node computes the whole prompt. With p2pkv the time counts from"
            " its arrival at the prefill node: what is new is computed once, by one node, and never again."
            " The decode node's part is what keeps it from generating for others.[/]"
        )
        self._print(f"took {seconds:.1f} s; the weights are random, so the text is noise")

    def problem(self, what: str) -> None:
        """Say why the demo fails."""
        self._console.print(Text(what, style="bold red"), soft_wrap=True)  # it may quote a traceback

    def _moved(self, ways: Sequence[tuple[str, messages.Traffic]]) -> None:
        """Show which pages came from where, and went to whom."""
        if not ways:
            return
        table = _table("pages moved", "to", "from", "transport", "pages", "MiB", "ms", "GB/s", n_text=3)
        for reader, way in ways:
            table.add_row(
                reader,
                way.source,
                way.transport,
                str(way.n_pages),
                f"{way.nbytes / MIB:g}",
                f"{way.seconds * 1e3:.2f}" if way.seconds else "-",
                f"{way.nbytes / way.seconds / 1e9:.2f}" if way.seconds else "-",
            )
        self._print(table)

    def _output(self, who: str, tokens: Tokens) -> None:
        self._print(Text(f"  {who:<18}").append(repr(decode(tokens).decode(errors="replace")), style="cyan"))

    def _warn(self, what: str) -> None:
        self._print(Text(what, style="yellow"))

    def _print(self, what: str | Text | Table) -> None:
        self._console.print(what)


def _table(title: str, *columns: str, n_text: int = 9) -> Table:
    """An empty table; the columns behind the first ``n_text`` hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < n_text else "right")
    return table


def _ways(
    reader: str, done: messages.PrefillDone | messages.GenerateDone
) -> list[tuple[str, messages.Traffic]]:
    return [(reader, way) for way in done.traffic]


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
