"""``p2pkv bench`` and ``p2pkv replay``: hand over to p2pkv-bench, which is not installed with what serves."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

from p2pkv.errors import ConfigError


def bench(context: typer.Context) -> None:
    """Measure this machine, or with ``serving`` endpoints; needs the package p2pkv-bench."""
    _hand_over("p2pkv_bench.cli", context)


def replay(context: typer.Context) -> None:
    """Say how much memory and disk a load is worth, from a trace of its requests; needs the package p2pkv-bench."""
    _hand_over("p2pkv_bench.replay.cli", context)


def _hand_over(module: str, context: typer.Context) -> None:
    if find_spec("p2pkv_bench") is None:
        raise ConfigError(
            "the benchmark is a package of its own; pip install p2pkv-bench, or in a checkout pip install ./bench"
        )
    import_module(module).main(context.args)
