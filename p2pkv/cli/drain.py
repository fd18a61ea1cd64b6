"""``p2pkv drain``: have a node hand its pages over to the others, so that it can be ended without a lost hit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from p2pkv.cache.drained import sentence
from p2pkv.cli.output import AsJson, AsLines
from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.seconds import LONGEST_S, a_number
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.control.secret import cluster_keys

_BEYOND_S = 5.0
"""How much longer than the time it has a node is waited for."""


def drain(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="The node's id, as p2pkv status shows it.")],
    join: Join = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=LONGEST_S,
            callback=a_number,
            help="How long it may take. Default: what the node's own setting drain says.",
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=LONGEST_S,
            callback=a_number,
            help="How long to wait for the node, where --seconds is not given.",
        ),
    ] = 60.0,
    as_json: AsJson = False,
    as_lines: AsLines = False,
) -> None:
    """Have a node hand its pages over to the others: it stores nothing new from then on, and is about to leave.

    One that runs by p2pkv node ends then. One within an engine serves what it has until the engine ends.
    """
    loaded = load(config, settings, **({"join": join} if join else {}))
    wait_s = timeout if seconds is None else seconds + _BEYOND_S
    with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
        drained = outsider.drain(node_id, addresses_to_ask(loaded, timeout), seconds, wait_s)
    if as_json or as_lines:
        typer.echo(json.dumps(None if drained is None else asdict(drained)))
    elif drained is None:
        typer.echo(f"{node_id} has begun to hand its pages over, and has gone")
    else:
        typer.echo(f"{node_id} has {sentence(drained)}")
