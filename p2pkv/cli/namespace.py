"""``p2pkv namespace``: what is done to a namespace in the whole cluster."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from p2pkv.cli.output import AsJson, AsLines
from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.seconds import Timeout
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.cli.tenants import tenants
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.epochs import Bump
from p2pkv.directory.view import State
from p2pkv.errors import ConfigError, ControlError

_HINT_S = 1.0
"""How long nodes have to say which namespaces there are, once all is done."""

app = typer.Typer(help="What is done to a namespace in the whole cluster.", no_args_is_help=True)


@app.callback()
def namespace() -> None:
    """Act on a namespace in the whole cluster."""


Name = Annotated[
    str, typer.Argument(help="The setting `namespace`; engines' own namespaces below it are meant too.")
]


@app.command()
def bump(
    name: Name,
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
    as_lines: AsLines = False,
) -> None:
    """Have nothing that was published in a namespace so far be found any more, in memory or on disk.

    Ends with an error if a member could not be told.
    """
    done = _bump(name, join, config, settings, timeout)
    _say(done, f"{name} is in epoch {done.epoch}, known to {_nodes(done)}", as_json=as_json or as_lines)


def purge(
    name: Name,
    join: Join = None,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
    as_lines: AsLines = False,
) -> None:
    """Drop all pages of a namespace, in memory and on disk, at every node. It is a bump of the namespace.

    Ends with an error if a member could not be told.
    """
    done = _bump(name, join, config, settings, timeout)
    text = (
        f"what was published in {name} so far is gone from {_nodes(done)} (it is in epoch {done.epoch} now)"
    )
    _say(done, text, as_json=as_json or as_lines)


def _bump(name: str, join: Join, config: ConfigFile, settings: Settings, timeout: float) -> Bump:
    loaded = load(config, settings, **({"join": join} if join else {}))
    with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
        addresses = addresses_to_ask(loaded, timeout)
        _refuse_tenant(name, outsider, addresses, timeout)
        done = outsider.bump(name, addresses, timeout)
        hint = ""
        with suppress(ControlError):  # it is bumped, whoever has no time to say more
            hint = _hint(name, outsider.namespaces(addresses, min(timeout, _HINT_S)))
    if hint:
        typer.echo(hint, err=True)
    return done


def _hint(name: str, namespaces: Collection[str]) -> str:
    """Say that it may be a typing error, if no node has this namespace or one below or above it; else nothing.

    It is no error: engines that are attached to a node may have a namespace of their own.
    """
    is_known = any(of == name or of.startswith(name + " ") or name.startswith(of + " ") for of in namespaces)
    if is_known or not namespaces:
        return ""
    theirs = ", ".join(sorted(namespaces)[:8]) + (" and others" if len(namespaces) > 8 else "")
    return f"no node that answers has the namespace {name!r}: theirs are {theirs}. Is it an attached engine's own?"


def _refuse_tenant(name: str, outsider: Outsider, addresses: Sequence[str], timeout: float) -> None:
    """Raise ConfigError if a node serves the namespace as a tenant: the cluster's members have none of its pages."""
    report, _ = outsider.members(addresses, timeout)
    alive = [member for member in report.members if member.state is State.ALIVE]
    for tenant in tenants(outsider.counters(alive, timeout)):
        if tenant.name == name.split(" ")[0]:
            raise ConfigError(
                f"{tenant.name} is a tenant of {', '.join(tenant.nodes)}: ask its own cluster, with the tenant's "
                f"secret_file and --join of an address that the tenant's settings name as listen; or have a program "
                f"that serves it call node.bump({name!r})"
            )


def _nodes(done: Bump) -> str:
    return "1 node" if len(done.heard) == 1 else f"{len(done.heard)} nodes"


def _say(done: Bump, text: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"epoch": done.epoch, "heard": done.heard, "unreached": done.unreached}))
    else:
        typer.echo(text)
    if done.unreached:
        raise ControlError(
            f"not told were {', '.join(done.unreached)}: until they are reached, they find what was published before "
            "with each other; bump again when they answer, or restart them"
        )
