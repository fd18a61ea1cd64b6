"""``p2pkv top``: what each node of a cluster is doing now, asked again and again without joining it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count as counting
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.view import Member
from p2pkv.errors import ControlError


@dataclass(frozen=True, slots=True)
class Reading:
    """What one round of questions brought. ``counters`` lacks the nodes that did not answer."""

    at: float
    asked: str
    members: Sequence[Member]
    counters: Mapping[str, Mapping[str, float]]


def top(
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time between readings.")] = 2.0,
    count: Annotated[
        int, typer.Option(metavar="N", min=0, help="Stop after N readings; 0: when interrupted.")
    ] = 0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for answers.")] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a reading, a line each.")
    ] = False,
) -> None:
    """Watch the nodes of a running cluster: pages and bytes a second, misses, room in pool and disk."""
    loaded = load(config, settings, **({"join": join} if join else {}))
    addresses = addresses_to_ask(loaded)
    with Outsider(cluster_keys(loaded.secret_file)) as outsider:
        readings = islice(_readings(outsider, addresses, every, timeout), count or None)
        try:
            if as_json:
                for reading in readings:
                    typer.echo(json.dumps(_record(reading)))
            else:
                _show(readings)
        except KeyboardInterrupt:
            return


def _readings(
    outsider: Outsider, addresses: Sequence[str], every: float, timeout: float
) -> Iterator[Reading]:
    """Ask for ever. Once it has met the cluster, it finds it through any member, and waits when none is there."""
    known: Sequence[str] = addresses
    began = time.monotonic()
    for n in counting(1):
        try:
            report, asked = outsider.members(known, timeout)
        except ControlError:
            if n == 1:
                raise
            yield Reading(time.monotonic(), "", (), {})
        else:
            members = sorted(
                (member for member in report.members if member.is_present), key=lambda member: member.node_id
            )
            known = tuple(dict.fromkeys([*addresses, *(member.address for member in members)]))
            told = outsider.counters(members, timeout)
            yield Reading(time.monotonic(), asked, members, told)
        time.sleep(max(0.0, began + n * every - time.monotonic()))


def _record(reading: Reading) -> dict[str, object]:
    return {
        "asked": reading.asked,
        "nodes": [
            {
                "node_id": member.node_id,
                "state": member.state.name,
                "boot_epoch": member.boot_epoch,
                "counters": reading.counters.get(member.node_id),
            }
            for member in reading.members
        ],
    }


def _show(readings: Iterator[Reading]) -> None:
    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    earlier: Reading | None = None
    with live or nullcontext():
        for reading in readings:
            page = Group(_headline(reading), _table(earlier, reading))
            if live is not None:
                live.update(page, refresh=True)
            else:
                console.print(page)
            earlier = reading


def _headline(reading: Reading) -> Text:
    if not reading.asked:
        return Text("no node answers; still asking", style="red")
    silent = len(reading.members) - len(reading.counters)
    told = f"; {silent} did not tell" if silent else ""
    return Text(f"{len(reading.members)} nodes, found through {reading.asked}{told}")


class _Change:
    """A node's counters, and their growth a second since the reading before; None where that is not known."""

    def __init__(self, now: Mapping[str, float], before: Mapping[str, float] | None, seconds: float) -> None:
        self.now = now
        self._before = before
        self._seconds = seconds

    def total(self, name: str) -> float:
        """Add up a metric over its labels."""
        return _total(self.now, name)

    def rate(self, name: str) -> float | None:
        if self._before is None or self._seconds <= 0:
            return None
        return (self.total(name) - _total(self._before, name)) / self._seconds


def _total(counters: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in counters.items() if key.partition("{")[0] == name)


_COLUMNS: Sequence[tuple[str, Callable[[_Change], str]]] = (
    ("fetched pages/s", lambda node: _number(node.rate("p2pkv_fetched_pages_total"))),
    ("bytes/s", lambda node: _nbytes(node.rate("p2pkv_fetched_bytes_total"))),
    ("missed/s", lambda node: _number(node.rate("p2pkv_missed_pages_total"))),
    ("published pages/s", lambda node: _number(node.rate("p2pkv_published_pages_total"))),
    ("bytes/s", lambda node: _nbytes(node.rate("p2pkv_published_bytes_total"))),
    ("evicted/s", lambda node: _number(node.rate("p2pkv_evicted_pages_total"))),
    ("handed over/s", lambda node: _nbytes(node.rate("p2pkv_taken_bytes_total"))),
    ("pages", lambda node: _number(node.total("p2pkv_pool_pages"))),
    ("pool", lambda node: _room(node, "p2pkv_pool_used_bytes", "p2pkv_pool_capacity_bytes")),
    ("disk", lambda node: _room(node, "p2pkv_disk_used_bytes", "p2pkv_disk_capacity_bytes")),
)


def _table(earlier: Reading | None, reading: Reading) -> Table:
    table = Table("node", "state")
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right")
    boots = {member.node_id: member.boot_epoch for member in earlier.members} if earlier is not None else {}
    for member in reading.members:
        cells = [Text(member.node_id), Text(member.state.name.lower())]
        now = reading.counters.get(member.node_id)
        if now is None:
            table.add_row(*cells, Text("no answer", style="yellow"))
            continue
        is_same_life = boots.get(member.node_id) == member.boot_epoch
        before = earlier.counters.get(member.node_id) if earlier is not None and is_same_life else None
        change = _Change(now, before, reading.at - earlier.at if earlier is not None else 0.0)
        table.add_row(*cells, *(show(change) for _, show in _COLUMNS))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _nbytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _room(node: _Change, used: str, capacity: str) -> str:
    room = node.total(capacity)
    return f"{node.total(used) / room:.0%} of {_nbytes(room)}" if room else "none"
