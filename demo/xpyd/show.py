"""What the xPyD demo shows: a live table of the instances, and a verdict on the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from demo.xpyd.load import Answered, Tally


class Show:
    """The live table; ``known`` says what the router knows of each instance."""

    def __init__(self, known: Callable[[], list[dict[str, Any]]]) -> None:
        self._known = known
        self._notes: list[str] = []

    def note(self, what: str) -> None:
        """Say below the table what was done."""
        self._notes.append(what)

    def table(self, tally: Tally) -> Group:
        """Return how things are now. Asks the router, and waits for it."""
        table = Table("instance", "role", "state", "breaker", title="instances", title_justify="left")
        for column in ("requests", "served", "tokens in flight"):
            table.add_column(column, justify="right")
        for one in self._known():
            table.add_row(
                one["id"],
                one["role"],
                one["state"],
                one["breaker"],
                str(one["in_flight"]),
                str(one["served"]),
                str(one["tokens"]),
            )
        n_errors = sum(bool(one.error) for one in tally.answered)
        said = f"{tally.n_sent} requests sent, {len(tally.answered)} answered, {n_errors} with an error"
        return Group(table, Text(said), *(Text(f"- {note}", style="yellow") for note in self._notes))


def judge(console: Console, tally: Tally, wrong: Sequence[Answered], alone: str) -> int:
    """Print what became of the requests; return the exit status: 0 only if all is as it must be.

    ``wrong`` differ from what ``alone`` generates.
    """
    errors = [one for one in tally.answered if one.error]
    innocent = [one for one in errors if not one.has_tokens]
    firsts = sorted(one.first_token_seconds for one in tally.answered if not one.error)
    if firsts:
        middle, late = firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.99)]
        console.print(f"time to first token: median {middle * 1e3:.0f} ms, p99 {late * 1e3:.0f} ms")
    n_right = len(tally.answered) - len(errors) - len([one for one in wrong if not one.error])
    console.print(f"[bold green]✓ {n_right} outputs equal to {alone}, token for token[/]")
    for one in errors:
        console.print(f"  broken off after {len(one.text)} tokens: {one.error}", markup=False)
    problems = [f"{len(wrong)} outputs differ from {alone}"] if wrong else []
    if innocent:
        problems.append(f"{len(innocent)} requests failed though none of their tokens had arrived")
    if len(tally.answered) != tally.n_sent:
        problems.append(f"{tally.n_sent - len(tally.answered)} requests never ended")
    for problem in problems:
        console.print(f"[bold red]✗ {problem}[/]")
    return 1 if problems else 0


def show_choices(console: Console, counted: Mapping[str, float]) -> None:
    """Print what the router says of its choices."""
    console.print(f"retried on another pair: {counted.get('p2pkv_proxy_retries_total', 0):.0f}")
    for name, value in sorted(counted.items()):
        if name.startswith("p2pkv_proxy_choices_total"):
            console.print(f"  chosen for {name.split(chr(34))[1]}: {value:.0f}", markup=False)
