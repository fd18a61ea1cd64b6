"""The indexer of a node: what it asks, and where it is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from p2pkv.address import split_address
from p2pkv.config import Config
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member
from p2pkv.indexer.indexer import Indexer
from p2pkv.indexer.server import IndexerServer
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics import Metrics
from p2pkv.page import Namespace
from p2pkv.parts.control import ControlParts

_log = logging.getLogger(__name__)


def make_indexer_server(
    config: Config,
    directory: DirectoryClient,
    control: ControlParts,
    members: Callable[[], Iterable[Member]],
    metrics: Metrics,
) -> IndexerServer:
    """Take the address that ``indexer`` says, to be served from there."""
    indexer = Indexer(directory.get, lambda name: Namespace(name, control.epochs), members)
    return IndexerServer(
        split_address("indexer", config.indexer),
        indexer,
        token=config.indexer_token,
        count=lambda outcome: metrics.count(metrics.indexer_requests, outcome, 1),
        log=LimitedLog(_log),
    )
