"""``p2pkv node``: a node in the foreground, for a cache server of its own or to try things out."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from typing import Annotated

import typer

from p2pkv import transports
from p2pkv.cache.drained import DRAIN_SLACK_S, Drained, sentence
from p2pkv.cli.logs import Format, Level, LogFormat, LogLevel, write_logs
from p2pkv.cli.narration import say
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.cli.signals import EndedError, EndingSignals
from p2pkv.cli.untraceable import become_untraceable
from p2pkv.config import Config
from p2pkv.directory.view import Member
from p2pkv.errors import ConfigError
from p2pkv.keeper.systemd import drop_unclaimed
from p2pkv.node import Node

_LOOK_S = 0.2
"""Between two looks at who is there; the view itself changes within a second or two."""


NAMES = f"Settings: {', '.join(field.name for field in dataclasses.fields(Config))}"
"""What the help of the command ends with."""


def run(
    config: ConfigFile = None,
    settings: Settings = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
    drain: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="As the setting drain: 0 leaves at once."),
    ] = None,
) -> None:
    """Run a node until SIGINT, SIGTERM or p2pkv drain, and say who comes and goes.

    It hands its pages over to others then, for as long as the setting drain says; a second signal ends that too.
    Settings come from --set, --config and P2PKV_* variables, in this order; p2pkv settings says what each means.
    """
    write_logs(log_level, log_format)
    given = {} if drain is None else {"drain": drain}
    loaded = load(config, settings, **given)
    if loaded.attach:
        raise ConfigError(
            f"attach is {loaded.attach!r}, but p2pkv node is what engines attach to, and can't be attached itself; "
            "leave attach (P2PKV_ATTACH) out, or set attach_listen to have engines attach there"
        )
    run_until_ended(loaded)


def run_until_ended(config: Config) -> None:
    """Run the node of ``config`` until SIGINT, SIGTERM or p2pkv drain, and print who comes and goes."""
    become_untraceable()
    with ExitStack() as undo:
        ending = undo.enter_context(EndingSignals())
        try:
            with ending.raised():
                node = undo.enter_context(Node.start(config))
        except EndedError:
            say(f"node {config.node_id} was ended while it started")
            return
        if config.keeper == "systemd":
            drop_unclaimed()
        ways = transports.described(_own(node).transports)
        metrics = "" if node.metrics_port is None else f", metrics on port {node.metrics_port}"
        indexer = "" if node.indexer_port is None else f", indexer on port {node.indexer_port}"
        say(f"node {node.node_id} listens on {node.address}, transports {ways}{metrics}{indexer}")
        known: dict[str, Member] = {}
        while True:
            now = {member.node_id: member for member in node.members() if member.node_id != node.node_id}
            for line in _changes(known, now):
                say(line)
            known = now
            if ending.wait(_LOOK_S) or node.drained is not None:
                break
        if (drained := _drained(node, ending)) is not None:
            say(f"node {node.node_id} has {sentence(drained)}")
    say(f"node {node.node_id} left its cluster")


def _drained(node: Node, ending: EndingSignals) -> Drained | None:
    """Have the node hand its pages over, if it has not yet; None if it has none, or another signal came first."""
    is_own = bool(node.config.pool_nbytes) and not _is_kept(node)
    tenants = [node.tenant(name) for name in node.config.tenants_by_name]
    nodes = [node] if is_own else [tenant for tenant in tenants if not _is_kept(tenant)]
    if node.config.drain and node.drained is None:
        for each in nodes:
            each.begin_drain(node.config.drain)
        # a tenant's that somebody else has told to take longer does not keep this process
        seconds = max(node.config.drain, node.draining_within or 0.0)
        until = time.monotonic() + seconds + DRAIN_SLACK_S
        while any(each.drained is None for each in nodes) and time.monotonic() < until:
            if ending.wait(_LOOK_S / 4, times=2):
                break
    return node.drained


def _is_kept(node: Node) -> bool:
    """Whether a keeper has its pages now: its next life goes on with them, unless it was told to hand them over."""
    return node.counters().get("p2pkv_pool_is_kept") == 1 and node.draining_within is None


def _own(node: Node) -> Member:
    return next(member for member in node.members() if member.node_id == node.node_id)


def _changes(before: dict[str, Member], now: dict[str, Member]) -> list[str]:
    lines = []
    for node_id in sorted(before.keys() | now.keys()):
        old, new = before.get(node_id), now.get(node_id)
        if new is None:
            lines.append(f"- {node_id} is gone")
        elif old is None:
            lines.append(f"+ {node_id} at {new.address} is {new.state.name.lower()}")
        elif old.boot_epoch != new.boot_epoch:
            lines.append(f"~ {node_id} at {new.address} was restarted")
        elif old.state is not new.state:
            lines.append(f"~ {node_id} is {new.state.name.lower()}")
    return lines
