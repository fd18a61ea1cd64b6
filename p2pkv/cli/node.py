"""``p2pkv node``: a node in the foreground, for a cache server of its own or to try things out."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from p2pkv.cli.logs import Level, LogLevel, write_logs
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.cli.signals import EndingSignals
from p2pkv.directory.view import Member
from p2pkv.node import Node

_LOOK_S = 0.2
"""Between two looks at who is there; the view itself changes within a second or two."""


def run(config: ConfigFile = None, settings: Settings = None, log_level: LogLevel = Level.INFO) -> None:
    """Run a node until SIGINT or SIGTERM, and say who comes and goes.

    Settings come from --set, --config and P2PKV_* variables, in this order; p2pkv.Config has them all.
    """
    write_logs(log_level)
    # One line a message, whatever the terminal's width: it may be read by a program.
    console = Console(highlight=False, soft_wrap=True)
    with EndingSignals() as ending, Node.start(load(config, settings)) as node:
        transports = ", ".join(dict(_own(node).transports))
        metrics = "" if node.metrics_port is None else f", metrics on port {node.metrics_port}"
        console.print(
            Text(f"node {node.node_id} listens on {node.address}, transports {transports}{metrics}")
        )
        known: dict[str, Member] = {}
        while True:
            now = {member.node_id: member for member in node.members() if member.node_id != node.node_id}
            for line in _changes(known, now):
                console.print(Text(line))
            known = now
            if ending.wait(_LOOK_S):
                break
    console.print(Text(f"node {node.node_id} left its cluster"))


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
