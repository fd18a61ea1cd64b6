"""Metrics as text, in the two formats that Prometheus asks for.

An engine's threads wait for the interpreter while it is made, so it is made in small parts: between two of them the
interpreter is let go. The longest took 0.66 ms on a busy machine, most of it in the library's writing of samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from p2pkv.metrics import Metrics

_AT_ONCE = 4
"""Families, most of which have one sample."""
_END = b"# EOF\n"


class _Part(Collector):
    """Some families, as what writes them takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def write(metrics: Metrics, more: Iterable[Collector], accept: str) -> tuple[str, bytes]:
    """Return the content type that an ``Accept`` header asks for, and all metrics in it.

    ``more``: what is shown beside the node's own.
    """
    encode, content_type = choose_encoder(accept)
    parts = []
    for families in _in_parts(metrics, more):
        parts.append(encode(_Part(families)).removesuffix(_END))
        _let_others_run()
    for timing in metrics.timings.all():
        for series in timing.lines():
            parts.append(series.encode())
        _let_others_run()
    if "openmetrics" in content_type:
        parts.append(_END)
    return content_type, b"".join(parts)


def _in_parts(metrics: Metrics, more: Iterable[Collector]) -> Iterator[list[Metric]]:
    for source in (metrics.registry, *more):
        families = iter(source.collect())
        while part := list(islice(families, _AT_ONCE)):
            yield part


def _let_others_run() -> None:
    time.sleep(0)
