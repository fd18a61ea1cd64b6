"""``p2pkv announce``: a sidecar that checks an engine's health and reports it to the routers."""

from __future__ import annotations

import http.client
import logging
import signal
import threading
from types import FrameType
from typing import Annotated
from urllib.parse import urlsplit

import typer

from p2pkv.heartbeat import INTERVAL_S, Heart, Instance, Load, Mode, Role, State, checked
from p2pkv.secret import cluster_keys

_log = logging.getLogger(__name__)

_PATIENCE = 2
"""Checks in a row that must fail: a busy engine may answer one late."""
_MAX_PAGE = 4 << 20
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")


class EngineCheck:
    """Looks at an engine over HTTP; used by one thread."""

    def __init__(self, url: str, health_path: str, timeout: float) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._connection = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._health_path = health_path
        self._timeout = timeout
        self._n_failed = 0
        self._was_healthy = False
        self.is_draining = False

    def look(self) -> Load:
        """Return how the engine is; blocks for the time-out at most, for each of two pages."""
        is_healthy = self._get(self._health_path) is not None
        self._n_failed = 0 if is_healthy else self._n_failed + 1
        if not is_healthy and not self._was_healthy:
            return Load(State.STARTING)
        if self._n_failed >= _PATIENCE:
            return Load(State.FAILING)
        self._was_healthy = True
        metrics = (self._get("/metrics") or b"").decode(errors="replace") if is_healthy else ""
        state = State.DRAINING if self.is_draining else State.READY
        return Load(state, _total(metrics, _RUNNING), _total(metrics, _WAITING))

    def _get(self, path: str) -> bytes | None:
        """Return a page; None unless its status is 200."""
        connection = self._connection(*self._address, timeout=self._timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(_MAX_PAGE)
        except (OSError, http.client.HTTPException) as error:
            _log.debug("the engine does not answer for %s: %s", path, error)
            return None
        finally:
            connection.close()
        return body if response.status == 200 else None


def _total(metrics: str, names: tuple[str, ...]) -> int:
    """Add up the samples of the metrics called so, whatever their labels."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(names):
            name, _, value = line.rpartition(" ")
            try:
                total += float(value) if name.partition("{")[0].strip() in names else 0.0
            except ValueError:
                continue
    return max(0, int(total)) if total == total and total < 1e9 else 0


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
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS")] = INTERVAL_S,
) -> None:
    """Check an engine's health and report it to routers, until SIGTERM or SIGINT; SIGUSR1 drains it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
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
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    heart = Heart(instance, router, cluster_keys(secret_file), check.look, interval=interval)

    def drain(number: int, frame: FrameType | None) -> None:
        check.is_draining = True
        heart.beat_now()

    signal.signal(signal.SIGUSR1, drain)
    try:
        typer.echo(f"{instance.id} is announced to {', '.join(router)} as a {role.value}")
        stopping.wait()
    finally:
        heart.close()
