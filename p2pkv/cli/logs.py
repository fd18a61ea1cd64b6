"""What the commands that run for long write to stderr: a line an event, with its time, for people or for programs."""

from __future__ import annotations

import json
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


class Format(str, Enum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


LogLevel = Annotated[Level, typer.Option("--log-level", help="The least that is written to stderr.")]
LogFormat = Annotated[
    Format,
    typer.Option("--log-format", help="Lines for people, or a JSON object a line for collectors of logs."),
]

_TIME = "%Y-%m-%dT%H:%M:%SZ"


class _JsonLines(logging.Formatter):
    """An object a record: time in UTC, process, level, logger, message, and the traceback if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": self.formatTime(record, _TIME),
            "process": record.process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def write_logs(level: Level, form: Format = Format.TEXT, *, who: str = "") -> None:
    """Write what this process logs to stderr from now on, with times in UTC.

    ``who`` stands before each text for people; objects name the process.
    """
    formatter: logging.Formatter = _JsonLines()
    if form is Format.TEXT:
        formatter = logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s", _TIME)
        formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.name, handlers=[handler])
