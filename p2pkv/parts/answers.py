"""What a node answers besides pages: questions of peers and of the command line, indexer queries, scrapes, its page."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from p2pkv.cache.drained import asked_seconds, encode_drained
from p2pkv.config import Config
from p2pkv.control.counters import encode_counters
from p2pkv.control.questions import QuestionServer
from p2pkv.control.wire import Kind
from p2pkv.dashboard.cluster import ClusterReading
from p2pkv.dashboard.site import Site
from p2pkv.explain.watch import NamespaceWatch
from p2pkv.explain.working_sets import WorkingSets
from p2pkv.metrics_server import MetricsServer
from p2pkv.parts.cache import CacheParts
from p2pkv.parts.indexer import serve_indexer

if TYPE_CHECKING:
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
        caching.on_drain = parts.membership.drain
        undo.callback(QuestionServer(loop, Kind.DRAIN, partial(_answer_drain, caching, config)).close)
    undo.callback(QuestionServer(loop, Kind.EXPLAIN, parts.witness.answer).close)


def _answer_drain(caching: CacheParts, config: Config, body: bytes) -> bytes:
    """Begin to drain, if this node has not, and say what has become of its pages, once that is known."""
    caching.drainer.begin(asked_seconds(body, config.drain))
    return encode_drained(caching.drainer.drained)


def serve_http(parts: NodeParts, config: Config, undo: ExitStack) -> tuple[int | None, int | None]:
    """Answer the indexer's queries, and scrapes beside the node's page, where that is wanted; return both ports."""
    indexer_port = None
    if config.indexer and parts.caching is not None:
        indexer = serve_indexer(
            config,
            parts.caching.directory,
            parts.control,
            lambda: parts.membership.view().present(),
            parts.metrics,
        )
        undo.callback(indexer.close)
        indexer_port = indexer.port
    if config.metrics_port is None:
        return indexer_port, None
    host = config.metrics_host or parts.control.host
    reading = ClusterReading(
        config.node_id, config.cluster, parts.control.client, parts.membership.view, parts.metrics.counters
    )
    site = Site(host, config.dashboard_token, reading.read, parts.explainer.explain)
    server = MetricsServer(host, config.metrics_port, parts.metrics, parts.not_ready, site.answer)
    undo.callback(server.close)
    return indexer_port, server.port
