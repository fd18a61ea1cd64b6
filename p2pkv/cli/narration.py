"""What a command that runs for long tells people on stdout.

Whoever reads it may go away, and a disk that takes it may be full. Neither is a reason for a node to end, and to take
its pages along: nothing more is written there then, and the log, which says the same, goes on.
"""

from __future__ import annotations

import logging
import os
import sys

import typer

_log = logging.getLogger(__name__)


def say(line: str) -> None:
    """Write a line to stdout; where that can't be written say so in the log, once, and write nothing more there."""
    try:
        typer.echo(line)
    except OSError as error:
        _log.warning(
            "stdout can't be written: %s; what would be said there is only in the log from now on",
            error.strerror,
        )
        _write_nothing_more()


def _write_nothing_more() -> None:
    """Lead stdout to nowhere: what it has not written yet would else be tried again, and be an error at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
