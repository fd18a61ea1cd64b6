"""What the command says of itself: settings, versions, and in which forms it prints."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer.main
from typer.testing import CliRunner

from p2pkv import Config
from p2pkv.cli import app
from p2pkv.cli.logs import _JsonLines
from p2pkv.errors import ConfigError

NAMES = [field.name for field in dataclasses.fields(Config)]


def output(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_every_setting_is_shown_with_its_default_and_what_it_means() -> None:
    text = output("settings")
    for name in NAMES:
        assert re.search(rf"^{name}( = .*)?\n    \S+ \S+", text, re.MULTILINE), name
    shown = {one["name"]: one for one in json.loads(output("settings", "--json"))["settings"]}
    assert list(shown) == NAMES
    assert shown["replicas"]["default"] == str(Config().replicas)
    assert shown["node_id"]["default"] == ""  # another one at each start
    lines = output("settings", "pool_size", "join", "--jsonl").splitlines()
    assert [json.loads(line)["variable"] for line in lines] == ["P2PKV_POOL_SIZE", "P2PKV_JOIN"]


def test_a_setting_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no setting 'pool_sise'; did you mean 'pool_size'"):
        CliRunner().invoke(app, ["settings", "pool_sise"], catch_exceptions=False)


def test_the_help_of_node_names_every_setting() -> None:
    words = set(re.findall(r"\w+", output("node", "--help")))
    assert set(NAMES) <= words


def test_a_command_imports_no_other_one() -> None:
    """Importing all of them takes a second of a processor, which is longer than most of them run."""
    code = (
        "import sys; from p2pkv.cli import app; app(['version'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "p2pkv.cli.describe" in imported
    assert not {"p2pkv.node", "p2pkv.cli.node", "p2pkv.cli.doctor"} & imported


def test_versions_are_shown() -> None:
    assert output("version").startswith(f"p2pkv {version('p2pkv')}, Python {sys.version_info.major}.")
    assert json.loads(output("version", "--json"))["p2pkv"] == version("p2pkv")


def _commands(command: object, name: str) -> list[tuple[str, set[str]]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [(name, {text for one in command.params for text in one.opts})]  # type: ignore[attr-defined]
    return [found for child, one in children.items() for found in _commands(one, f"{name} {child}")]


def test_whatever_prints_a_document_prints_lines_too() -> None:
    forms = {
        name: options & {"--json", "--jsonl"}
        for name, options in _commands(typer.main.get_command(app), "p2pkv")
    }
    assert {name for name, has in forms.items() if has} > {
        "p2pkv top",
        "p2pkv explain",
        "p2pkv namespace bump",
    }
    assert {name for name, has in forms.items() if len(has) == 1} == set()


def test_a_line_of_a_log_for_programs_is_an_object_with_all_of_it() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord(
            "p2pkv.x", logging.WARNING, "", 0, "peer %s:\nlost", ("n",), sys.exc_info()
        )
    line = _JsonLines().format(record)
    said = json.loads(line)
    assert "\n" not in line
    assert (said["level"], said["logger"], said["message"]) == ("warning", "p2pkv.x", "peer n:\nlost")
    assert said["process"] == os.getpid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", said["time"])
    assert "ValueError: why" in said["traceback"]
