"""``p2pkv keeper``: keeps the memory of nodes' pools while the nodes are restarted."""

from __future__ import annotations

from typing import Annotated

import typer

from p2pkv.cli.logs import Format, Level, LogFormat, LogLevel, write_logs
from p2pkv.cli.narration import say
from p2pkv.cli.signals import EndingSignals
from p2pkv.cli.untraceable import become_untraceable
from p2pkv.errors import ConfigError
from p2pkv.keeper.server import KeeperServer

_LOOK_S = 0.2
"""Between two looks whether it is to end."""


def run(
    address: Annotated[str, typer.Argument(help="unix:/PATH, which nodes have as their setting keeper.")],
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Keep the memory of the pools of this host's nodes until SIGINT or SIGTERM.

    It maps none of it. What it keeps goes with it, unless a node has it: that one hands it to the next keeper.
    """
    path = address.removeprefix("unix:")
    if path == address or not path.startswith("/"):
        raise ConfigError(f"a keeper listens at unix: and an absolute path, not {address!r}")
    write_logs(log_level, log_format)
    become_untraceable()
    server = KeeperServer(path)
    try:
        with EndingSignals() as ending:
            say(f"keeper listens at {address}")
            while not ending.wait(0.0):
                server.serve(_LOOK_S)
    finally:
        server.close()
