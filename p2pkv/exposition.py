"""Metrics as text, in the two formats that Prometheus asks for.

An engine's threads wait for the interpreter while it is made, so it is made in small parts: between two of them the
interpreter is let go. Samples are written here: the library looks at every letter of every label, and took four fifths
of a scrape for it. That strict parsers, and promtool, take what is written is a test.

Times of birth of counters (``_created``) are left out: they double the series, and Prometheus does not use them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from p2pkv.metrics import Metrics

_AT_ONCE = 16
"""Lines of a part, which take 2 to 5 us each."""
_SERIES_AT_ONCE = 4
"""Series of a histogram in a part, each of which has twenty lines."""
_END = "# EOF\n"


def write(metrics: Metrics, more: Iterable[Collector], accept: str) -> tuple[str, bytes]:
    """Return the content type that an ``Accept`` header asks for, and all metrics in it.

    ``more``: what is shown beside the node's own.
    """
    content_type = choose_encoder(accept)[1]
    is_openmetrics = "openmetrics" in content_type
    parts = []
    for n, line in enumerate(_samples((metrics.registry, *more), is_openmetrics=is_openmetrics)):
        parts.append(line)
        if n % _AT_ONCE == 0:
            _let_others_run()
    for timing in metrics.timings.all():
        for n, series in enumerate(timing.lines(with_exemplars=is_openmetrics)):
            parts.append(series)
            if n % _SERIES_AT_ONCE == 0:
                _let_others_run()
    if is_openmetrics:
        parts.append(_END)
    return content_type, "".join(parts).encode()


def _samples(sources: Iterable[Collector], *, is_openmetrics: bool) -> Iterator[str]:
    for source in sources:
        for family in source.collect():
            yield from _lines(family, is_openmetrics=is_openmetrics)


def _lines(family: Metric, *, is_openmetrics: bool) -> Iterator[str]:
    name = family.name
    if family.type == "counter" and not is_openmetrics:
        name = f"{name}_total"
    yield f"# HELP {name} {_escaped(family.documentation, with_quotes=is_openmetrics)}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        value = _number(sample.value)
        if sample.labels:
            labels = ",".join([f'{key}="{_escaped(text)}"' for key, text in sample.labels.items()])
            yield f"{sample.name}{{{labels}}} {value}\n"
        else:
            yield f"{sample.name} {value}\n"


def _escaped(text: str, *, with_quotes: bool = True) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n")
        return text.replace('"', '\\"') if with_quotes else text
    return text


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _let_others_run() -> None:
    time.sleep(0)
