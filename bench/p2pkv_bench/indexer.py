"""The indexer: how long a question about 1,000 pages takes, and how soon an eviction is in the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np

from p2pkv.indexer.indexer import Indexer
from p2pkv.node import Node
from p2pkv.page import Namespace
from p2pkv.parts.cache import CacheParts
from p2pkv_bench.errors import BenchError
from p2pkv_bench.exists import published
from p2pkv_bench.pair import OWNER, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile, timed_calls
from p2pkv_bench.rows import MIB, Row, Target, make_row

_PAGES = 1000
_PAGE_NBYTES = 4096
_BLOCK = 16
_CALLS = 1000
_EVICTIONS = 100
_AT_MOST_US = 1000.0
_LAG_AT_MOST_MS = 20.0
_PATIENCE_S = 10.0


def rows(meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Ask a node of this process about pages that another process has, whose entries lie with both."""
    plan.tell("indexer")
    in_process, over_http, lags = [], [], []
    with Pair(meeting, plan.transports[0], 64 * MIB) as pair:
        keys = published(pair, _PAGES)
        with (
            meeting.start("asked", pool_size=16 * MIB, indexer="127.0.0.1:0") as asked,
            meeting.start("evicting", pool_size=_PAGES * _PAGE_NBYTES) as evicting,
        ):
            indexer = _indexer_of(asked)
            question = _registered(indexer, asked, OWNER, keys)
            connection = HTTPConnection("127.0.0.1", asked.indexer_port, timeout=10)
            for _ in range(plan.rounds):
                in_process.append(_p99_us(lambda: _holds(indexer.query_by_hash(question), OWNER)))
                over_http.append(_p99_us(lambda: _post(connection, "/query_by_hash", question)))
            connection.close()
            lags = [_lag_ms(indexer, asked, evicting, number) for number in range(_EVICTIONS)]
    target = Target(_AT_MOST_US, at_most=True)
    yield make_row(
        {"p2pkv": in_process}, suite="indexer", case="p99, in process", unit="us", batch=_PAGES, target=target
    )
    yield make_row({"p2pkv": over_http}, suite="indexer", case="p99, over HTTP", unit="us", batch=_PAGES)
    yield make_row(
        {"p2pkv": lags},
        suite="indexer",
        case="until an eviction is answered",
        unit="ms",
        batch=_PAGES,
        target=Target(_LAG_AT_MOST_MS, at_most=True),
    )
    yield make_row(
        {"p2pkv": [percentile(lags, 99)]},
        suite="indexer",
        case="until an eviction is answered, p99",
        unit="ms",
        batch=_PAGES,
        target=Target(_LAG_AT_MOST_MS, at_most=True),
    )


def _indexer_of(node: Node) -> Indexer:
    """Return one as the node has it, to be asked without HTTP."""
    caching = node._parts.caching  # there is no public way to ask in process
    assert isinstance(caching, CacheParts)
    return Indexer(caching.directory.get, Namespace, node.members)


def _registered(indexer: Indexer, asked: Node, node_id: str, keys: list[str]) -> bytes:
    told = {
        "instance_id": node_id,
        "model": node_id,
        "block_size": _BLOCK,
        "namespace": asked.config.namespace,
    }
    body = json.dumps(told).encode()
    indexer.register(body)
    connection = HTTPConnection("127.0.0.1", asked.indexer_port, timeout=10)
    _post(connection, "/register", body)
    connection.close()
    return json.dumps({"model": node_id, "seq_hashes": keys}).encode()


def _post(connection: HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    if answer.status != 200:
        raise BenchError(f"{path} was answered with {answer.status}: {told}")


def _holds(told: dict[str, Any], node_id: str) -> None:
    if told["default"][node_id]["CPU"] != _PAGES * _BLOCK:
        raise BenchError(f"pages that are there were not found: {told}")


def _p99_us(call: Callable[[], object]) -> float:
    return percentile(timed_calls([call] * _CALLS), 99) * 1e6


def _lag_ms(indexer: Indexer, asked: Node, evicting: Node, number: int) -> float:
    """Return how long after a publish that fills the pool the pages that it evicted are still said to be there."""
    keys = [f"evicted-{number}-{at}" for at in range(_PAGES)]
    memory = np.zeros((_PAGES, _PAGE_NBYTES), np.uint8)
    with evicting.register_memory(memory):
        question = _registered(indexer, asked, "evicting", keys)
        evicting.publish(keys, memory)
        _until(indexer, question, lambda n: n > 0)
        evicting.publish([f"new-{key}" for key in keys], memory)
        began = time.perf_counter()
        _until(indexer, question, lambda n: n == 0)
        return (time.perf_counter() - began) * 1e3


def _until(indexer: Indexer, question: bytes, is_so: Callable[[int], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not is_so(_external(indexer.query_by_hash(question))):
        if time.monotonic() > until:
            raise BenchError(f"the indexer was not true to the pool within {_PATIENCE_S:g} s")
        time.sleep(0.0005)  # so that the node that is asked about gets to run


def _external(told: dict[str, Any]) -> int:
    return int(told["default"]["evicting"]["EXTERNAL"])
