"""The command ``p2pkv-proxy``."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.address import split_address
from p2pkv.cli.logs import Format, Level, LogFormat, LogLevel, write_logs
from p2pkv.control.secret import cluster_keys
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv_proxy.continuation import Resume

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_NEEDED = ("httptools", "starlette", "uvicorn")


def unavailable() -> str | None:
    """Return what is missing to run the router, as one sentence, or None."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    return f"the router needs {', '.join(missing)}; pip install 'p2pkv[proxy]'" if missing else None


@app.command()
def proxy(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients come.")] = "127.0.0.1:8000",
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL[,KEY=VALUE...]", help="A prefill instance; may be repeated."),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL[,KEY=VALUE...]", help="A decode instance.")
    ] = None,
    both: Annotated[
        list[str] | None, typer.Option(metavar="URL[,KEY=VALUE...]", help="An ordinary engine.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="How the named instances work together; per instance: ,mode=MODE.")
    ] = Mode.VLLM,
    instances: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instances as a JSON list; read again when it changes."),
    ] = None,
    heartbeats: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where instances report; empty: nowhere.")
    ] = "127.0.0.1:8100",
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Policies, limits and keys' priorities as JSON, in place of options; read again when it changes.",
        ),
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The cluster's secret; without it: this user's.")
    ] = None,
    accepted_secret_file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A secret that nodes may go by besides; may be repeated."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Clients' keys: KEY or NAME KEY a line; read again when it changes."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Serve HTTPS with this certificate and its chain; read again when it changes.",
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None,
    engines_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Authorities that engines with https:// have their certificates of."
        ),
    ] = None,
    engines_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The key that engines want, which they get instead of the client's."
        ),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="A p2pkv node, for predicted and cache_aware; may be repeated."
        ),
    ] = None,
    ext_proc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer an Envoy that asks where requests go (ext_proc), as an endpoint picker.",
        ),
    ] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The heartbeat address of a router beside this one; needless where engines or nodes know both.",
        ),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Where engines and other routers reach this one, if not where it listens."
        ),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            help="For prefills; docs/xpyd.md says what each takes: predicted, prefix, least_loaded and others."
        ),
    ] = "prefix",
    decode_policy: Annotated[str, typer.Option(help="For decodes, of the same.")] = "least_loaded",
    access_log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A line of JSON for each request; -: to stdout."),
    ] = None,
    tracing: Annotated[
        bool, typer.Option("--tracing", help="Spans of OpenTelemetry; a provider must be set up.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that serve the port together; one uses one core.")
    ] = 1,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests at once; more get 429.")] = 1024,
    queue_length: Annotated[
        int, typer.Option(min=0, help="Requests that wait while all instances are full; more get 429.")
    ] = 256,
    queue_timeout: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="For each of them; then it gets 429.")
    ] = 10.0,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Of a request.")] = "16MiB",
    attempts: Annotated[int, typer.Option(min=1, max=10, help="Pairs a request is tried on.")] = 3,
    resume: Annotated[
        Resume, typer.Option(help="Streams that go on elsewhere when their decode fails.")
    ] = Resume.GREEDY,
    strict_pd: Annotated[
        bool, typer.Option("--strict-pd", help="Refuse requests rather than have decodes compute prompts.")
    ] = False,
    pass_unknown: Annotated[
        bool,
        typer.Option("--pass-unknown", help="Pass on paths that the router does not know, to one instance."),
    ] = False,
    answer_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="For an engine's next bytes; of a whole answer, the request's."
        ),
    ] = 120.0,
    stalled_after: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="For a begun stream's next bytes while its engine's health fails.",
        ),
    ] = 20.0,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="For a whole request.")
    ] = 900.0,
    body_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="For a request's body to arrive.")
    ] = 30.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="For requests under way at SIGTERM; then they are broken off."
        ),
    ] = 30.0,
    direct_below: Annotated[
        int,
        typer.Option(min=0, metavar="TOKENS", help="Fewer to compute than this: the decode alone does it."),
    ] = 0,
    lifetime: Annotated[
        float, typer.Option(min=0.5, metavar="SECONDS", help="An instance not heard of for so long is gone.")
    ] = 10.0,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Route requests to any number of prefill and decode instances of SGLang or vLLM."""
    write_logs(log_level, log_format)
    if (missing := unavailable()) is not None:
        raise ConfigError(missing)
    from p2pkv.values import parse_size
    from p2pkv_proxy.access_log import check_writable
    from p2pkv_proxy.api_keys import keys_in_environment
    from p2pkv_proxy.crew import serve_with
    from p2pkv_proxy.ext_proc import unavailable as needed_for_ext_proc
    from p2pkv_proxy.listing import parse_instance
    from p2pkv_proxy.plan import Files, Plan
    from p2pkv_proxy.policies import POLICIES
    from p2pkv_proxy.reloading import loaded
    from p2pkv_proxy.server import serve
    from p2pkv_proxy.settings import Settings, check_settings
    from p2pkv_proxy.spans import Spans

    for name in (policy, decode_policy):
        if name not in POLICIES:
            raise ConfigError(f"--policy takes {', '.join(POLICIES)}; not {name!r}")
    for address in join or ():
        split_address("--join", address)
    if (tls_cert is None) is not (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: one of them is missing")
    check_writable(access_log)
    if tracing:
        Spans()
    if ext_proc is not None:
        split_address("--ext-proc", ext_proc)
        if (missing := needed_for_ext_proc()) is not None:
            raise ConfigError(missing)
    for address in replica or ():
        split_address("--replica", address)
    named = [
        parse_instance(text, role, mode)
        for role, texts in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both))
        for text in texts or ()
    ]
    plan = Plan(
        settings=Settings(
            max_body=parse_size("--max-body", max_body),
            body_timeout=body_timeout,
            answer_timeout=answer_timeout,
            stalled_after=stalled_after,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            attempts=attempts,
            resume=resume,
            strict_pd=strict_pd,
            pass_unknown=pass_unknown,
            max_in_flight=max_in_flight,
            queue_length=queue_length,
            queue_timeout=queue_timeout,
            direct_below=direct_below,
        ),
        prefill_policy=policy,
        decode_policy=decode_policy,
        files=Files(
            settings=settings,
            instances=instances,
            api_keys=api_keys,
            tls_cert=tls_cert,
            tls_key=tls_key,
            engines_ca=engines_ca,
            engines_key=engines_key,
        ),
        instances=tuple(named),
        heartbeats=heartbeats or None,
        lifetime=lifetime,
        join=tuple(join or ()),
        keys=cluster_keys(secret_file, accepted_secret_file or ()) if heartbeats or join else None,
        has_own_secret=secret_file is None,
        ext_proc=ext_proc,
        replicas=tuple(replica or ()),
        advertise=advertise,
        api_keys=keys_in_environment(api_keys),
        access_log=access_log,
        logs=(log_level, log_format),
        tracing=tracing,
    )
    check_settings(plan.settings)
    plan = loaded(plan)  # what is wrong with files is said here, not by each worker
    if not join and (unserved := [name for name in plan.policies if POLICIES[name].wants_holdings]):
        logging.getLogger(__name__).warning(
            "--policy %s goes by what the p2pkv nodes hold, and without --join no node is asked: it chooses as it does "
            "where the directory can't say; name a node: --join HOST:PORT",
            unserved[0],
        )
    host, port = split_address("--listen", listen)
    if workers == 1:
        serve(plan, host, port)
    else:
        serve_with(plan, host, port, workers)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except P2PKVError as error:
        typer.echo(f"p2pkv-proxy: {error}", err=True)
        sys.exit(1)
