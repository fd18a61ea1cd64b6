"""``p2pkv status``: what the nodes of a cluster believe about each other, asked without joining it."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from datetime import datetime, timezone
from typing import Annotated

import typer
import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pkv.address import split_address
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.control import ControlClient, Request, Socket
from p2pkv.directory.view import Member, Report, State, decode, encode
from p2pkv.errors import ConfigError, ControlError
from p2pkv.names import Names
from p2pkv.secret import ClusterKeys, cluster_keys
from p2pkv.wire import Kind

_COLORS = {State.ALIVE: "green", State.SUSPECT: "yellow", State.DEAD: "red", State.LEFT: "dim"}


def status(
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="A node to ask; may be repeated. Default: the setting 'join'."
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for an answer.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a table.")] = False,
) -> None:
    """Show the members of a running cluster, as the first node that answers sees them."""
    loaded = load(config, settings, **({"join": join} if join else {}))
    if not loaded.join_addresses:
        raise ConfigError("status needs the address of a node: give --join HOST:PORT, or the setting 'join'")
    report, address = _ask(loaded.join_addresses, cluster_keys(loaded.secret_file), timeout)
    members = sorted(report.members, key=lambda member: (member.state, member.node_id))
    if as_json:
        typer.echo(json.dumps({"asked": address, "members": [_record(member) for member in members]}))
    else:
        _show(report.sender, address, members)


def _ask(addresses: tuple[str, ...], keys: ClusterKeys, timeout: float) -> tuple[Report, str]:
    """Return the first answer, and whose it is. A view without members teaches the asked node nothing."""
    question = encode("p2pkv-status", ())
    context: zmq.Context[Socket] = zmq.Context()
    try:
        names = Names()
        names.wait_for(addresses, timeout)
        with closing(ControlClient(context, keys, names)) as client:
            requests = [Request(address, Kind.EXCHANGE, question) for address in addresses]
            with client.send(requests) as calls:
                for index, reply in calls.replies(timeout):
                    if reply.ok:
                        return decode(reply.body), addresses[index]
    finally:
        context.term()
    reasons = "; ".join(f"{address}: {_why_silent(address)}" for address in addresses)
    raise ControlError(f"no node answered within {timeout:g} s ({reasons})")


def _why_silent(address: str) -> str:
    """Tell nobody there from somebody who does not let us in: CURVE refuses a wrong secret without a word."""
    try:
        with socket.create_connection(split_address("join", address), timeout=1.0) as connection:
            connection.settimeout(1.0)
            greeting = connection.recv(10)
    except TimeoutError:
        return "it accepts connections, but says nothing; the process may be stopped"
    except OSError as error:
        return f"{error.strerror or error}; is a node running there?"
    if greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f":
        return "something speaks ZMQ there, but does not let us in; is secret_file the cluster's?"
    return "what listens there is no p2pkv node"


def _record(member: Member) -> dict[str, object]:
    return {
        "node_id": member.node_id,
        "state": member.state.name,
        "boot_epoch": member.boot_epoch,
        "address": member.address,
        "transports": dict(member.transports),
    }


def _show(sender: str, address: str, members: list[Member]) -> None:
    console = Console(highlight=False)
    n_alive = sum(member.state is State.ALIVE for member in members)
    console.print(Text(f"{n_alive} of {len(members)} known nodes are alive, says {sender} at {address}"))
    table = Table("node", "state", "started", "boot epoch", "address", "transports")
    for member in members:
        started = datetime.fromtimestamp(member.boot_epoch / 1e9, timezone.utc)
        table.add_row(
            Text(member.node_id),
            Text(member.state.name.lower(), style=_COLORS[member.state]),
            f"{started:%Y-%m-%d %H:%M:%S} UTC",
            str(member.boot_epoch),
            Text(member.address),
            Text(", ".join(member.transports)),
        )
    console.print(table)
