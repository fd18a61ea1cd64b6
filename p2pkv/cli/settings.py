"""Where a subcommand's configuration comes from: ``--set``, then ``--config``, then the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pkv.config import Config, read_settings
from p2pkv.errors import ConfigError

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as a JSON object."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting; may be repeated, wins over --config. Options of a single transport are JSON: "
        """--set 'transport_options={"tcp": {"streams": 4}}'; `p2pkv doctor` shows those in force.""",
    ),
]


def load(file: Path | None, assignments: list[str] | None, **more: object) -> Config:
    """Make the configuration; ``more`` are settings that options of their own gave."""
    values = dict(read_settings(file))
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, not {assignment!r}")
        values[key.strip()] = value
    return Config.load(values | more)
