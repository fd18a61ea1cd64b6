"""What the documents show must run, or be what is there: Python, commands, settings, lines of logs, sums."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from p2pkv.cli import app
from p2pkv.config import Config
from p2pkv_bench.replay.cli import replay
from p2pkv_proxy.cli import app as proxy

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(kind: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{path.name}-{i}")
        for path in DOCUMENTS
        for i, block in enumerate(re.findall(rf"^```(?:{kind})\n(.*?)^```", path.read_text(), re.S | re.M))
    ]


BLOCKS = [block for block in blocks("python") if not str(block.id).startswith("quickstart")]
"""Those of the quickstart are run by the test that walks it."""


def test_there_is_something_to_run() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_of_the_documents_runs(block: str) -> None:
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_links_between_the_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


@pytest.mark.parametrize("block", blocks("bash|sh"))
def test_a_shell_block_of_the_documents_is_shell(block: str) -> None:
    read = subprocess.run(
        ["bash", "-n"], input=block, capture_output=True, text=True, timeout=60, check=False
    )
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize("block", blocks("json"))
def test_a_json_block_of_the_documents_is_json(block: str) -> None:
    json.loads(block)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_a_yaml_block_of_the_documents_is_yaml(block: str) -> None:
    assert isinstance(yaml.safe_load(block), dict)


_CALL = re.compile(
    r"""\s*(?:timeout\ \d+\s|\w+=(?:'[^']*'|[^\s'"]*)\s+)*  # what comes before
        (p2pkv(?:-proxy)?\ .*?)
        (?:\s+\d?>.*|\s+\#.*|\s+&)?$""",
    re.VERBOSE,
)


def commands() -> Iterator[Any]:
    """Yield each call of one of our commands that stands in a block, as words."""
    for path in DOCUMENTS:
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.S | re.M):
            lines = block.replace("\\\n", " ").splitlines() if kind in ("", "bash", "sh") else ()
            for line in lines:
                found = _CALL.match(line)
                if found is not None and path.name != "disk.md":  # its files begin so
                    yield pytest.param(shlex.split(found[1]), id=f"{path.name}: {found[1][:60]}")


COMMANDS = list(commands())


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 12


def _command(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that these words name, and what is left of them."""
    alone = typer.Typer(add_completion=False)
    if words[:2] == ["p2pkv", "replay"]:
        alone.command()(replay)
        return typer.main.get_command(alone), words[2:]
    command: Any = typer.main.get_command(proxy if words[0] == "p2pkv-proxy" else app)
    rest = words[1:]
    while (children := getattr(command, "commands", None)) is not None:
        assert rest[0] in children, f"there is no {rest[0]} of {command.name}"
        command, rest = children[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_documents_is_one_and_has_these_options(words: list[str]) -> None:
    command, rest = _command(words)
    if command.name == "bench":  # of p2pkv-bench, which has its own tests
        return
    known = {name for parameter in command.params for name in getattr(parameter, "opts", ())}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known
    settings = {field.name for field in dataclasses.fields(Config)}
    for word, value in pairwise(rest):
        if word == "--set":
            assert value.partition("=")[0] in settings


def _sources() -> str:
    """All text of the programs, with literals that stand one behind the other put together."""
    paths = [
        *(ROOT / "p2pkv").rglob("*.py"),
        *(ROOT / "proxy").rglob("*.py"),
        *(ROOT / "native/src").rglob("*.cc"),
    ]
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in paths)


def test_every_line_that_troubleshooting_quotes_is_said_by_a_program() -> None:
    """Between what differs from time to time; ``…`` stands for a value."""
    sources = _sources()
    rows = re.findall(r"^\|[^|]*\|(.*?)\|[^|]*\|$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 30
    for text in quoted:
        if text.startswith(("p2pkv ", "p2pkv_")):  # a command, a metric: others look after these
            continue
        for part in text.split("…"):
            assert part.strip() in sources, f"nothing says {part.strip()!r}"


def test_the_table_of_models_is_what_its_formula_says() -> None:
    page = (ROOT / "docs/capacity.md").read_text()
    rows = re.findall(
        r"^\| ([A-Z].*?|gpt.*?) \| (\d+) \| (\d+)(?: x (\d+))? \| (\d+) \| ([\d.]+) MiB \|$", page, re.M
    )
    assert len(rows) >= 10
    for model, layers, first, size, said, page_mib in rows:
        numbers = 2 * int(first) * int(size) if size else int(first)  # keys and values, or one latent row
        nbytes = int(layers) * numbers * 2
        assert nbytes == int(said), model
        assert f"{nbytes * 64 / 2**20:.1f}" == page_mib, model


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_run_of_a_real_engine_stands_in_its_document(engine: str) -> None:
    files = {
        path.name
        for path in (ROOT / "tests" / "engines").glob("test_real_*.py")
        if f"pytest.mark.{engine}" in path.read_text()
    }
    table = (ROOT / "docs" / f"{engine}.md").read_text().partition("What was run, and how")[2]
    assert set(re.findall(r"^\|.*`(test_real_\w+\.py)`", table, re.M)) == files
