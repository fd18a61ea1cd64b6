"""``p2pkv status``: what the nodes of a cluster believe about each other, asked without joining it."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Annotated

import typer
from rich.text import Text

from p2pkv import transports
from p2pkv.cli.busiest import hot_pages, lines, slow_peers
from p2pkv.cli.output import AsJson
from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.seconds import Timeout
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.cli.tables import console, table
from p2pkv.cli.tenants import tenant_lines, tenants
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.view import Member, Report, State

_COLORS = {State.ALIVE: "green", State.SUSPECT: "yellow", State.DEAD: "red", State.LEFT: "dim"}


def status(
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Timeout = 2.0,
    as_json: AsJson = False,
    as_lines: Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON a member.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="End with status 1 if a member is dead or suspect, for monitoring."),
    ] = False,
) -> None:
    """Show the members of a running cluster, as the first node that answers sees them, hot pages and slow peers."""
    loaded = load(config, settings, **({"join": join} if join else {}))
    addresses = addresses_to_ask(loaded, timeout)
    with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
        report, address = outsider.members(addresses, timeout)
        alive = [member for member in report.members if member.state is State.ALIVE]
        counters = {} if as_lines else outsider.counters(alive, timeout)
        answering = [member for member in alive if member.node_id in counters]
        hot = hot_pages(outsider.hot_pages(answering, timeout))
    slow = slow_peers(counters, {})
    served = tenants(counters)
    members = sorted(report.members, key=lambda member: (member.state, member.node_id))
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "asked": address,
                    "cluster": report.cluster,
                    "members": [_record(member) for member in members],
                    "hot_pages": [page._asdict() for page in hot],
                    "slow_peers": [peer._asdict() for peer in slow],
                    "tenants": [tenant._asdict() for tenant in served],
                }
            )
        )
    elif as_lines:
        for member in members:
            typer.echo(json.dumps(_record(member)))
    else:
        _show(report, address, members, [*tenant_lines(served), *lines(hot, slow)])
    if check and any(member.state in (State.SUSPECT, State.DEAD) for member in members):
        raise typer.Exit(1)


def _record(member: Member) -> dict[str, object]:
    return {
        "node_id": member.node_id,
        "state": member.condition,
        "boot_epoch": member.boot_epoch,
        "address": member.address,
        "transports": dict(member.transports),
    }


def _show(report: Report, address: str, members: list[Member], below: list[Text]) -> None:
    printer = console()
    n_alive = sum(member.state is State.ALIVE for member in members)
    who = f"{n_alive} of {len(members)} known nodes of cluster {report.cluster} are alive"
    printer.print(Text(f"{who}, says {report.sender} at {address}"))
    rows = table("node", "state", "started", "boot epoch", "address", "transports")
    for member in members:
        started = datetime.fromtimestamp(member.boot_epoch / 1e9, timezone.utc)
        rows.add_row(
            Text(member.node_id),
            Text(member.condition.lower(), style="yellow" if member.is_draining else _COLORS[member.state]),
            f"{started:%Y-%m-%d %H:%M:%S} UTC",
            str(member.boot_epoch),
            Text(member.address),
            Text(transports.described(member.transports)),
        )
    printer.print(rows)
    for line in below:
        printer.print(line)
