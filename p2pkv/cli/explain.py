"""``p2pkv explain``: where a page is, or why it is not there, asked of every member without joining them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from p2pkv.cli.output import AsJson, AsLines, print_parts
from p2pkv.cli.outsider import Join, Outsider, addresses_to_ask
from p2pkv.cli.seconds import Timeout
from p2pkv.cli.settings import ConfigFile, Settings, load
from p2pkv.config import Config
from p2pkv.control.secret import cluster_keys
from p2pkv.errors import UsageError
from p2pkv.explain.asking import question_about
from p2pkv.explain.sentences import lines, record, request_lines, request_record


def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY|REQUEST", help="What the page was published as; or with --request, its id."
        ),
    ],
    join: Join = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="The namespace that it was published in. Default: the setting 'namespace', where that is given; "
            "else each node's own is looked in."
        ),
    ] = None,
    is_id: Annotated[
        bool,
        typer.Option(
            "--id", help="KEY is the page's id instead, as KV events carry it: 32 hexadecimal digits."
        ),
    ] = False,
    is_request: Annotated[
        bool,
        typer.Option(
            "--request",
            help="Say instead what an engine's request found and missed, of engines with the setting tracing.",
        ),
    ] = False,
    config: ConfigFile = None,
    settings: Settings = None,
    timeout: Timeout = 2.0,
    as_json: AsJson = False,
    as_lines: AsLines = False,
) -> None:
    """Say where a page is, or why it is not there: evicted when, taken back, owner gone, another namespace."""
    loaded = load(config, settings, **({"join": join} if join else {}))
    if is_request:
        if is_id or namespace is not None:
            raise UsageError("--request stands alone: a request has no namespace, and is no page")
        with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
            found = outsider.explain_request(key, addresses_to_ask(loaded, timeout), timeout)
        if as_lines:
            print_parts(request_record(found), "request", ("calls",))
        else:
            typer.echo(json.dumps(request_record(found)) if as_json else "\n".join(request_lines(found)))
        return
    page_id = _hexadecimal(key) if is_id else None
    # The default may be given, and may be nobody's choice: then each node looks in its own.
    given = loaded.namespace if loaded.namespace != Config().namespace else None
    question = question_about(None if is_id else key, page_id, given if namespace is None else namespace)
    with Outsider(cluster_keys(loaded.secret_file, loaded.accepted_secret_files)) as outsider:
        explained = outsider.explain(question, addresses_to_ask(loaded, timeout), timeout)
    if as_json:
        typer.echo(json.dumps(record(explained)))
    elif as_lines:
        print_parts(record(explained), "page", ("places", "elsewhere", "events"))
    else:
        typer.echo("\n".join(lines(explained)))


def _hexadecimal(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"--id takes 32 hexadecimal digits, not {text!r}") from None
