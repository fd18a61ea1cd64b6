"""``p2pkv bench``: hand over to the package p2pkv-bench, which is not installed with what serves."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

from p2pkv.errors import ConfigError


def bench(context: typer.Context) -> None:
    """Measure this machine, or with ``serving`` endpoints; needs the package p2pkv-bench."""
    if find_spec("p2pkv_bench") is None:
        raise ConfigError(
            "the benchmark is a package of its own; pip install p2pkv-bench, or in a checkout pip install ./bench"
        )
    import_module("p2pkv_bench.cli").main(context.args)
