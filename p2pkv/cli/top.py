"""``p2pkv top``: what each node of a cluster is doing now, asked again and again without joining it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count as counting
from itertools import islice
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pkv.cli.busiest import HotPage, SlowPeer, hot_pages, lines, slow_peers
from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.seconds import LONGEST_S, Timeout, a_number
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.cli.tables import console, table
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.view import Member, State
from p2pkv.errors import ControlError


@dataclass(frozen=True, slots=True)
class Reading:
    """What one round of questions brought. ``counters`` lacks the nodes that did not answer."""

    at: float
    asked: str
    members: Sequence[Member]
    counters: Mapping[str, Mapping[str, float]]
    hot_pages: Sequence[HotPage] = ()


def top(
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, max=LONGEST_S, callback=a_number, help="Time between readings."
        ),
    ] = 2.0,
    count: Annotated[
        int, typer.Option(metavar="N", min=0, help="Stop after N readings; 0: when interrupted.")
    ] = 0,
    timeout: Timeout = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with N readings, one by default.")
    ] = False,
    as_lines: Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON a reading.")] = False,
) -> None:
    """Watch the nodes of a running cluster: pages and bytes a second, misses, room, hot pages, slow peers."""
    loaded = load(config, settings, **({"join": join} if join else {}))
    addresses = addresses_to_ask(loaded, timeout)
    with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
        n_readings = (count or 1) if as_json else (count or None)
        readings = islice(_readings(outsider, addresses, every, timeout), n_readings)
        try:
            if as_json:
                typer.echo(json.dumps({"readings": list(_records(readings))}))
            elif as_lines:
                for record in _records(readings):
                    typer.echo(json.dumps(record))
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
                report.members, key=lambda member: (member.state > State.SUSPECT, member.node_id)
            )
            present = [member for member in members if member.is_present]
            known = tuple(dict.fromkeys([*addresses, *(member.address for member in present)]))
            told = outsider.counters(present, timeout)
            answering = [member for member in present if member.node_id in told]
            hot = hot_pages(outsider.hot_pages(answering, timeout))
            yield Reading(time.monotonic(), asked, members, told, hot)
        time.sleep(max(0.0, began + n * every - time.monotonic()))


def _records(readings: Iterable[Reading]) -> Iterator[dict[str, object]]:
    earlier: Reading | None = None
    for reading in readings:
        yield _record(earlier, reading)
        earlier = reading


def _record(earlier: Reading | None, reading: Reading) -> dict[str, object]:
    return {
        "asked": reading.asked,
        "nodes": [
            {
                "node_id": member.node_id,
                "state": member.condition,
                "boot_epoch": member.boot_epoch,
                "counters": reading.counters.get(member.node_id),
            }
            for member in reading.members
        ],
        "hot_pages": [page._asdict() for page in reading.hot_pages],
        "slow_peers": [peer._asdict() for peer in _slow_peers(earlier, reading)],
    }


def _show(readings: Iterator[Reading]) -> None:
    printer = console()
    live = Live(console=printer, auto_refresh=False) if printer.is_terminal else None
    earlier: Reading | None = None
    with live or nullcontext():
        for reading in readings:
            below = lines(reading.hot_pages, _slow_peers(earlier, reading))
            headline = _headline(reading)
            if earlier is None and reading.asked:
                headline.append("; rates are since each node's start")
            page = Group(headline, _table(earlier, reading), *below)
            if live is not None:
                live.update(page, refresh=True)
            else:
                printer.print(page)
            earlier = reading


def _slow_peers(earlier: Reading | None, reading: Reading) -> list[SlowPeer]:
    return slow_peers(reading.counters, {} if earlier is None else earlier.counters)


def _headline(reading: Reading) -> Text:
    if not reading.asked:
        return Text("no node answers; still asking", style="red")
    n_present = sum(member.is_present for member in reading.members)
    silent, gone = n_present - len(reading.counters), len(reading.members) - n_present
    told = f"; {silent} did not tell" if silent else ""
    lost = f"; {gone} more are dead or have left" if gone else ""
    nodes = "1 node" if n_present == 1 else f"{n_present} nodes"
    return Text(f"{nodes}, found through {reading.asked}{told}{lost}{_since_start(reading)}")


def _since_start(reading: Reading) -> str:
    """Say what the nodes have found so far, and would have found without evictions, once one of them has asked all."""
    rate, ceiling = (
        max((_total(told, f"p2pkv_cluster_{what}_ratio") for told in reading.counters.values()), default=0.0)
        for what in ("hit_rate", "hit_rate_ceiling")
    )
    return f"; hit rate since their start {rate:.0%}, of at most {ceiling:.0%}" if ceiling else ""


def _seconds_since_start(counters: Mapping[str, float]) -> float:
    """Return how long a node runs, by its clock and this one's; 0 if it does not say."""
    started = counters.get("p2pkv_start_time_seconds", 0.0)
    return max(1.0, time.time() - started) if started else 0.0


class _Change:
    """A node's counters, and their growth a second since some moment before; None where that is not known."""

    def __init__(self, now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> None:
        self.now = now
        self._before = before
        self._seconds = seconds

    def total(self, name: str) -> float:
        """Add up a metric over its labels."""
        return _total(self.now, name)

    def hit_rate(self) -> str:
        hits, missed = self.rate("p2pkv_fetched_pages_total"), self.rate("p2pkv_missed_pages_total")
        return "-" if not hits and not missed else f"{(hits or 0) / ((hits or 0) + (missed or 0)):.0%}"

    def rate(self, *names: str) -> float | None:
        if self._seconds <= 0:
            return None
        return sum(self.total(name) - _total(self._before, name) for name in names) / self._seconds


def _total(counters: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in counters.items() if key.partition("{")[0] == name)


_PUBLISHED_PAGES = ("p2pkv_published_pages_total", "p2pkv_attach_stored_pages_total")
_PUBLISHED_BYTES = ("p2pkv_published_bytes_total", "p2pkv_attach_stored_bytes_total")
"""They count what a node's calls publish, and what attached engines do, which are no members and so have no line."""

_COLUMNS: Sequence[tuple[str, Callable[[_Change], str]]] = (
    ("fetched pages/s", lambda node: _number(node.rate("p2pkv_fetched_pages_total"))),
    ("bytes/s", lambda node: _nbytes(node.rate("p2pkv_fetched_bytes_total"))),
    ("hit rate", lambda node: node.hit_rate()),
    ("missed/s", lambda node: _number(node.rate("p2pkv_missed_pages_total"))),
    ("published pages/s", lambda node: _number(node.rate(*_PUBLISHED_PAGES))),
    ("bytes/s", lambda node: _nbytes(node.rate(*_PUBLISHED_BYTES))),
    ("evicted/s", lambda node: _number(node.rate("p2pkv_evicted_pages_total"))),
    ("handed over/s", lambda node: _nbytes(node.rate("p2pkv_taken_bytes_total"))),
    ("pages", lambda node: _number(node.total("p2pkv_pool_pages"))),
    ("pool", lambda node: _room(node, "p2pkv_pool_used_bytes", "p2pkv_pool_capacity_bytes")),
    ("disk", lambda node: _room(node, "p2pkv_disk_used_bytes", "p2pkv_disk_capacity_bytes")),
)


def _table(earlier: Reading | None, reading: Reading) -> Table:
    rows = table("node", "state", *(title for title, _ in _COLUMNS), right=len(_COLUMNS))
    boots = {member.node_id: member.boot_epoch for member in earlier.members} if earlier is not None else {}
    for member in reading.members:
        cells = [Text(member.node_id), Text(member.condition.lower())]
        now = reading.counters.get(member.node_id)
        if now is None:
            gone = member.state is State.DEAD or member.state is State.LEFT
            rows.add_row(*cells, Text("" if gone else "no answer", style="yellow"))
            continue
        is_same_life = boots.get(member.node_id) == member.boot_epoch
        before = earlier.counters.get(member.node_id) if earlier is not None and is_same_life else None
        if earlier is None or before is None:
            change = _Change(now, {}, _seconds_since_start(now))
        else:
            change = _Change(now, before, reading.at - earlier.at)
        rows.add_row(*cells, *(show(change) for _, show in _COLUMNS))
    return rows


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
