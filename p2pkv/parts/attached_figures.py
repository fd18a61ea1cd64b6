"""Figures of an attached engine as a whole, and whether it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

from p2pkv import _native
from p2pkv.attach.following import Following
from p2pkv.attach.own_host import OwnHost
from p2pkv.config import Config
from p2pkv.lifetime import weakly
from p2pkv.metrics import Metrics

Readings = Callable[[], Mapping[str, float]]


class AttachedFigures:
    """Thread-safe; the metrics ask at each scrape."""

    def __init__(
        self,
        config: Config,
        own_host: OwnHost,
        following: Following,
        epochs: _native.NamespaceEpochs,
        parts: Sequence[Readings],
        *,
        started: float,
    ) -> None:
        """``parts`` return what they count themselves; ``started`` is the time of day at which the engine did."""
        self._config = config
        self._own_host = own_host
        self._following = following
        self._epochs = epochs
        self._parts = parts
        self._started = started

    def serve(self, metrics: Metrics, undo: ExitStack) -> int | None:
        """Serve all metrics over HTTP, if a port is set; return which one it is."""
        config = self._config
        if config.metrics_port is None:
            return None
        # Imported here: an engine without it starts sooner.
        from p2pkv.metrics_server import MetricsServer

        server = MetricsServer(
            config.metrics_host or "127.0.0.1", config.metrics_port, metrics, weakly(self._not_ready)
        )
        undo.callback(server.close)
        server.start()
        return server.port

    def readings(self) -> dict[str, float]:
        """Return what the engine counts, and what its parts do."""
        readings: dict[str, float] = {
            "p2pkv_members": len(self._following.view.present()),
            "p2pkv_start_time_seconds": self._started,
            "p2pkv_namespace_epoch": self._epochs.own,
            "p2pkv_bumps_total": self._epochs.n_raised,
            "p2pkv_attached": self._own_host.attachment is not None and not self._following.is_silent,
            "p2pkv_attachments_total": self._own_host.n_attached,
        }
        for of_part in self._parts:
            readings.update(of_part())
        return readings

    @cached_property
    def _version(self) -> str:
        # It is read from files, which no scrape but the first should do, and no start.
        from importlib.metadata import version

        return version("p2pkv")

    def build_info(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return what says which version of p2pkv this is, of which engine."""
        config = self._config
        labels = (self._version, config.node_id, self._own_host.cluster, config.namespace)
        return {"p2pkv_build_info": {labels: 1.0}}

    def _not_ready(self) -> str | None:
        where = f"the host's node at unix:{self._own_host.path}"
        if self._own_host.attachment is None:
            return f"{where} is away: nothing is published"
        if self._following.is_silent:
            return f"{where} is there and does not answer: nothing is published"
        return None
