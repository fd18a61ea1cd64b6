"""``p2pkv announce``: a sidecar that checks an engine's health and reports it to the routers."""

from __future__ import annotations

import signal
from contextlib import closing
from types import FrameType
from typing import Annotated

import typer

from p2pkv.cli.logs import Format, Level, LogFormat, LogLevel, write_logs
from p2pkv.cli.seconds import LONGEST_S, a_number
from p2pkv.cli.signals import EndingSignals
from p2pkv.control.secret import cluster_keys
from p2pkv.instances.engine_check import EngineCheck
from p2pkv.instances.heartbeat import INTERVAL_S, Heart, Instance, Mode, Role, checked


def announce(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine: http://HOST:PORT.")],
    role: Annotated[Role, typer.Option(help="What it does.")],
    router: Annotated[
        list[str], typer.Option(metavar="HOST:PORT", help="A router's heartbeat address; may be repeated.")
    ],
    mode: Annotated[Mode, typer.Option(help="How a router hands requests to it.")] = Mode.VLLM,
    model: Annotated[str, typer.Option(help="The model's name in requests; without one all are taken.")] = "",
    name: Annotated[str, typer.Option("--id", help="The instance's name; by default its address.")] = "",
    bootstrap_host: Annotated[str, typer.Option(help="SGLang prefills: if not the host of URL.")] = "",
    bootstrap_port: Annotated[int | None, typer.Option(help="SGLang prefills: their bootstrap port.")] = None,
    kv_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="vllm-addresses: the KV connector.")
    ] = "",
    capacity: Annotated[int, typer.Option(min=0, help="Requests it may have at once; 0: any number.")] = 0,
    node_id: Annotated[str, typer.Option(help="Its p2pkv node, for cache_aware.")] = "",
    namespace: Annotated[str, typer.Option(help="The namespace of that node.")] = "",
    page_size: Annotated[int, typer.Option(min=0, help="Tokens a page, for cache_aware.")] = 0,
    key_prefix: Annotated[str, typer.Option(help="What its page keys begin with.")] = "",
    health_path: Annotated[
        str, typer.Option(help="A page that is 200 while the engine is well.")
    ] = "/health",
    secret_file: Annotated[str | None, typer.Option(metavar="FILE", help="The cluster's secret.")] = None,
    accepted_secret_file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A secret that routers may go by besides; may be repeated."),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, callback=a_number, metavar="SECONDS")
    ] = INTERVAL_S,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Check an engine's health and report it to routers, until SIGTERM or SIGINT; SIGUSR1 drains it."""
    write_logs(log_level, log_format)
    instance = checked(
        Instance(
            url=url,
            role=role,
            mode=mode,
            id=name,
            model=model,
            bootstrap_host=bootstrap_host,
            bootstrap_port=bootstrap_port,
            kv_address=kv_address,
            capacity=capacity,
            node_id=node_id,
            namespace=namespace,
            page_size=page_size,
            key_prefix=key_prefix,
        )
    )
    check = EngineCheck(instance.url, health_path, timeout=interval)
    keys = cluster_keys(secret_file, accepted_secret_file or ())
    heart = Heart(instance, router, keys, check.look, interval=interval)

    def drain(number: int, frame: FrameType | None) -> None:
        check.is_draining = True
        heart.beat_now()

    signal.signal(signal.SIGUSR1, drain)
    with EndingSignals() as ending, closing(heart):
        while not ending.wait():
            pass  # it was SIGUSR1
