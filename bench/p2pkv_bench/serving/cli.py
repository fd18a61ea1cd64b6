"""``p2pkv bench serving``: drive OpenAI-compatible endpoints with a load."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from p2pkv.errors import ConfigError

if TYPE_CHECKING:
    from p2pkv_bench.serving.client import Target

_Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]URL[,URL]...",
        help="Endpoints to compare, the first with the others; of several URLs each request goes to any.",
    ),
]


def serving(
    targets: _Targets = None,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead", help="Instead: an engine that answers at once, straight and through routers."
        ),
    ] = False,
    events: Annotated[
        bool,
        typer.Option(
            "--events", help="Instead: what a streamed event costs routers, by their processor time."
        ),
    ] = False,
    streams: Annotated[int, typer.Option(min=1, help="Of --events: streams at once.")] = 200,
    workers: Annotated[int, typer.Option(min=1, help="Of --events: the router's, beside one.")] = 1,
    nginx: Annotated[
        str, typer.Option(metavar="COMMAND", help="Of --events: nginx, to compare with.")
    ] = "nginx",
    sglang_python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Of --events: of an environment that has sglang-router."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model's name in requests.")] = "",
    rate: Annotated[float, typer.Option(min=0.01, metavar="PER_SECOND", help="Requests on average.")] = 20.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests a round and target.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the targets take turns in each.")] = 3,
    burst: Annotated[int, typer.Option(min=1, help="Requests that arrive at once; 1: Poisson.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with hash_ids and output_length.")
    ] = None,
    block: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Text for one hash of a trace.")] = 64,
    output_share: Annotated[float, typer.Option(help="Of a trace's output tokens to generate.")] = 0.05,
    max_prompt: Annotated[
        int, typer.Option(metavar="BYTES", help="Longer prompts of a trace are cut.")
    ] = 1500,
    prompt: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Of a random prompt.")] = 256,
    shared: Annotated[int, typer.Option(min=0, metavar="BYTES", help="Of it, shared with others.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="To generate behind a random prompt.")] = 16,
    slo_first: Annotated[float, typer.Option(metavar="SECONDS", help="Good: first token within.")] = 1.0,
    slo_token: Annotated[
        float, typer.Option(metavar="SECONDS", help="Good: each further token within.")
    ] = 0.1,
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Metrics page of a p2pkv node that computes prompts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one makes other requests.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw: FILE as PNG and SVG.")
    ] = None,
) -> None:
    """Send requests to endpoints in turn; show times to and between tokens, goodput, hits and the router's part."""
    from p2pkv_bench.serving import report
    from p2pkv_bench.serving.events import Plan as EventPlan
    from p2pkv_bench.serving.events import measure as measure_events
    from p2pkv_bench.serving.events import show as show_events
    from p2pkv_bench.serving.figures import Promise
    from p2pkv_bench.serving.overhead import targets as instant_targets
    from p2pkv_bench.serving.run import Plan, measure
    from p2pkv_bench.serving.workload import Load

    load = Load(
        rate=rate,
        n_requests=requests,
        burst=burst,
        prompt_bytes=prompt,
        shared_bytes=min(shared, prompt),
        n_new=tokens,
        trace=trace,
        block=block,
        output_share=output_share,
        max_prompt_bytes=max_prompt,
        seed=seed,
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    if events:
        with progress.status("starting") as status:
            event_plan = EventPlan(
                n_streams=streams,
                n_events=tokens,
                rounds=rounds,
                nginx=nginx,
                sglang_python=sglang_python,
                workers=workers,
                tell=lambda what: status.update(f"{time.monotonic() - began:.0f} s: {what}"),
            )
            costs, left_out = measure_events(event_plan)
        show_events(console, costs, left_out)
        return
    with progress.status("starting") as status, ExitStack() as undo:
        plan = Plan(
            targets=undo.enter_context(instant_targets()) if overhead else named(targets or [], model),
            load=load,
            rounds=rounds,
            promise=Promise(slo_first, slo_token),
            metrics=tuple(metrics or ()),
            tell=lambda what: status.update(f"{time.monotonic() - began:.0f} s: {what}"),
        )
        found = measure(plan)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found]))
    else:
        report.show(console, found)
    if plot_file is not None:
        for path in report.draw(found, plot_file):
            progress.print(f"wrote {path}", markup=False)


def named(texts: list[str], model: str) -> tuple[Target, ...]:
    """Return the targets of a command line. Raises :class:`ConfigError` unless all have names of their own."""
    from p2pkv_bench.serving.client import Target

    parts = [text.partition("=") if "=" in text.partition("://")[0] else (text, "=", text) for text in texts]
    has_empty = any(not url for _, _, urls in parts for url in urls.split(","))
    if not parts or has_empty or len({name for name, _, _ in parts}) != len(parts):
        raise ConfigError("give endpoints to measure, each [NAME=]URL with a name of its own; or --overhead")
    return tuple(
        Target(name, tuple(url.rstrip("/") for url in urls.split(",")), model) for name, _, urls in parts
    )
