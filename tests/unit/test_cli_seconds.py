"""Seconds that are no seconds are refused by every command that takes some, before it asks anybody."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from p2pkv.cli import app

COMMANDS = (
    ("status", "--timeout"),
    ("top", "--timeout"),
    ("top", "--every"),
    ("explain", "a page", "--timeout"),
    ("namespace", "bump", "a", "--timeout"),
    ("purge", "a", "--timeout"),
    ("drain", "a", "--timeout"),
    ("drain", "a", "--seconds"),
    ("announce", "http://127.0.0.1:1", "--interval"),
)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "1e300"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_number_of_seconds_is_refused(command: tuple[str, ...], seconds: str) -> None:
    refused = CliRunner().invoke(app, [*command[:-1], f"{command[-1]}={seconds}"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"Invalid value for '{command[-1]}'" in refused.output
