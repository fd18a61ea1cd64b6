"""Times that commands take as options, in seconds."""

from __future__ import annotations

import math
from typing import Annotated

import typer

LONGEST_S = 3600.0
"""More than anybody waits for a cluster; what takes numbers beyond is no clock but the kernel."""


def a_number(seconds: float | None) -> float | None:
    """Return it, or raise for nan, which is neither below an option's ``min`` nor above its ``max``."""
    if seconds is not None and math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds")
    return seconds


Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0, max=LONGEST_S, callback=a_number, help="How long to wait for answers."
    ),
]
