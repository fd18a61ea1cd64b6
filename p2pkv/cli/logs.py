"""What the commands that run for long write to stderr: a line an event, with its time."""

from __future__ import annotations

import logging
import time
from enum import Enum
from typing import Annotated

import typer


class Level(str, Enum):
    """The least that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[Level, typer.Option("--log-level", help="The least that is written to stderr.")]


def write_logs(level: Level) -> None:
    """Write what this process logs to stderr from now on, with times in UTC."""
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.name, handlers=[handler])
