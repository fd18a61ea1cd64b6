"""``p2pkv doctor``: can this machine run a node, over what, and what should be changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from p2pkv.cli.doctor.cluster import examine_cluster
from p2pkv.cli.doctor.disk import examine_disk
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.gpu import examine_gpu
from p2pkv.cli.doctor.host import examine_host
from p2pkv.cli.doctor.machine import examine_machine
from p2pkv.cli.doctor.transports import examine_transports
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.config import Config


def doctor(
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_lines: Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON a finding.")] = False,
) -> None:
    """Say what works here, what doesn't, and what to do about it. Exit status 1 if no node could run."""
    findings = list(examine(load(config, settings)))
    if as_json:
        typer.echo(json.dumps({"findings": [finding.as_record() for finding in findings]}))
    elif as_lines:
        for finding in findings:
            typer.echo(json.dumps(finding.as_record()))
    else:
        _show(findings)
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise typer.Exit(1)


def examine(config: Config) -> Iterator[Finding]:
    """Look at everything a node needs; ``BAD`` is what keeps it from running."""
    yield from examine_machine(config)
    yield examine_disk(config)
    yield from examine_gpu(config)  # before transports load the driver by another name
    yield from examine_transports(config)
    yield from examine_cluster(config)
    yield from examine_host(config)


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, color = finding.verdict.value
        line = Text(mark, style=color).append(
            f"  {finding.what:{width}}  {finding.says}", style="not bold default"
        )
        console.print(line.append(f"  -> {finding.advice}" if finding.advice else "", style=color))
