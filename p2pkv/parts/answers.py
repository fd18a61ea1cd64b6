"""What a node answers besides pages: questions of peers and of the command line, indexer queries, scrapes, its page.

It has its ports before it joins, so that others hear nothing of a node whose port is taken, start after start.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from p2pkv.cache.drained import asked_seconds, encode_drained
from p2pkv.config import Config
from p2pkv.control.counters import encode_counters
from p2pkv.control.questions import QuestionServer
from p2pkv.control.wire import Kind
from p2pkv.explain.watch import NamespaceWatch
from p2pkv.explain.working_sets import WorkingSets
from p2pkv.parts.cache import CacheParts
from p2pkv.served_port import ServedPort

if TYPE_CHECKING:
    from p2pkv.metrics_server import MetricsServer
    from p2pkv.parts.node import NodeParts


def answer_questions(parts: NodeParts, config: Config, undo: ExitStack) -> None:
    """Say to whoever asks what is counted here and what became of pages, and drain when told to."""
    loop, caching = parts.control.server.loop, parts.caching
    counters = QuestionServer(loop, Kind.COUNTERS, lambda _: encode_counters(parts.metrics.counters()))
    undo.callback(counters.close)
    if caching is not None:
        parts.witness.know_pool(caching.pool, caching.tier, caching.working_set.share)
        parts.witness.know_fetches(caching.cache.hot_pages)
        caching.working_set.gather = WorkingSets(
            config.node_id, lambda: parts.membership.view().present(), parts.explainer.ask
        ).gather
        watch = NamespaceWatch(config.namespace, caching.looked_up, parts.explainer.ask)
        undo.callback(watch.close)
        parts.metrics.watch(watch.readings)
        watch.start()
        caching.on_drain = lambda _: parts.membership.drain()
        undo.callback(QuestionServer(loop, Kind.DRAIN, partial(_answer_drain, caching, config)).close)
    undo.callback(QuestionServer(loop, Kind.EXPLAIN, parts.witness.answer).close)


def _answer_drain(caching: CacheParts, config: Config, body: bytes) -> bytes:
    """Begin to drain, if this node has not, and say what has become of its pages, once that is known."""
    caching.drainer.begin(asked_seconds(body, config.drain))
    return encode_drained(caching.drainer.drained)


class HttpPorts:
    """Where a node answers the indexer's queries, and scrapes beside its page, as far as either is wanted.

    The ports are taken at construction and given back at the end of ``undo``; nothing is answered before
    :meth:`serve`.
    """

    def __init__(self, parts: NodeParts, config: Config, undo: ExitStack) -> None:
        self._indexer = self._metrics = None
        if config.indexer and parts.caching is not None:
            # Imported here, as the other one: a node without them starts sooner.
            from p2pkv.parts.indexer import make_indexer_server

            self._indexer = make_indexer_server(
                config,
                parts.caching.directory,
                parts.control,
                lambda: parts.membership.view().present(),
                parts.metrics,
            )
            undo.callback(self._indexer.close)
        if config.metrics_port is not None:
            self._metrics = _metrics_server(parts, config, config.metrics_port)
            undo.callback(self._metrics.close)

    def serve(self, undo: ExitStack) -> tuple[int | None, int | None]:
        """Begin to answer, until ``undo`` comes to this call's part; return the ports of both."""
        return _serve(self._indexer, undo), _serve(self._metrics, undo)


def _metrics_server(parts: NodeParts, config: Config, port: int) -> MetricsServer:
    from p2pkv.dashboard.cluster import ClusterReading
    from p2pkv.dashboard.site import Site
    from p2pkv.metrics_server import MetricsServer

    host = config.metrics_host or parts.control.host
    reading = ClusterReading(
        config.node_id,
        config.cluster,
        parts.control.client,
        lambda: parts.membership.view(),
        parts.metrics.counters,
    )
    site = Site(host, config.dashboard_token, reading.read, parts.explainer.explain)
    return MetricsServer(host, port, parts.metrics, parts.not_ready, site.answer)


def _serve(port: ServedPort | None, undo: ExitStack) -> int | None:
    if port is None:
        return None
    undo.callback(port.close)
    port.start()
    return port.port
