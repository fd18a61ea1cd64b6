"""Metrics as text, in the two formats that Prometheus asks for.

An engine's threads wait for the interpreter while it is made. So what stands before a number is put together once,
histograms are written natively, and the interpreter is let go as soon as the rest has had it for a moment. Samples are
written here: the library looks at every letter of every label, and took four fifths of a scrape for it. That strict
parsers, and promtool, take what is written is a test.

Times of birth of counters (``_created``) are left out: they double the series, and Prometheus does not use them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from p2pkv.metrics import Family, Metrics

_HELD_S = 70e-6
"""Until the interpreter is let go, between two metrics. An engine's thread may wait for 0.2 ms: the metric that is read
last can take 20 us of it, joining the lines 10, and the kernel 50 and more to wake the thread."""
_ODD = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_END = b"# EOF\n"


class Exposition:
    """Writes all metrics of a node, as often as it is asked. Thread-safe.

    ``more`` is shown beside the node's own.
    """

    def __init__(self, metrics: Metrics, more: Sequence[Collector] = ()) -> None:
        self._metrics = metrics
        self._more = more
        # No lock: whoever finds a text missing makes the same one.
        self._known: dict[str, _Text] = {}

    def write(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that an ``Accept`` header asks for, and all metrics in it."""
        content_type = choose_encoder(accept)[1]
        is_openmetrics = "openmetrics" in content_type
        parts: list[bytes] = []
        lines: list[str] = []
        since = time.perf_counter()
        for family in self._families():
            self._add(family, lines, is_openmetrics=is_openmetrics)
            if time.perf_counter() - since > _HELD_S:
                parts.append("".join(lines).encode())
                lines.clear()
                time.sleep(0)
                since = time.perf_counter()
        parts.append("".join(lines).encode())
        time.sleep(0)
        parts += [timing.text(with_exemplars=is_openmetrics) for timing in self._metrics.timings.all()]
        if is_openmetrics:
            parts.append(_END)
        return content_type, b"".join(parts)

    def _families(self) -> Iterator[Family]:
        yield from self._metrics.families()
        for collector in self._more:
            for metric in collector.collect():
                name = f"{metric.name}_total" if metric.type == "counter" else metric.name
                samples = [sample for sample in metric.samples if sample.name == name]
                labels = tuple(samples[0].labels) if samples else ()
                values = {tuple(sample.labels.values()): sample.value for sample in samples}
                yield Family(name, metric.documentation, labels, values)

    def _add(self, family: Family, lines: list[str], *, is_openmetrics: bool) -> None:
        known = self._known.get(family.name)
        if known is None:
            known = self._known[family.name] = _Text(family)
        lines.append(known.head if is_openmetrics else known.classic_head)
        written = known.written
        for values, value in family.values.items():
            last = written.get(values)
            if last is None or last[0] != value:
                start = known.start(values) if last is None else last[1]
                number = repr(float(value))
                last = written[values] = value, start, f"{start}{_ODD.get(number, number)}\n"
            lines.append(last[2])


class _Text:
    """What of a metric is the same in each scrape."""

    def __init__(self, family: Family) -> None:
        name = family.name
        kind = "counter" if name.endswith("_total") else "gauge"
        self.head = _head(name.removesuffix("_total"), kind, _escaped(family.help))
        self.classic_head = _head(name, kind, _escaped(family.help, with_quotes=False))
        self.written: dict[tuple[str, ...], tuple[float, str, str]] = {}
        """By labels: the number that was written last, what stands before it, and the line; few change between
        scrapes."""
        self._name = name
        self._labels = family.labels

    def start(self, values: tuple[str, ...]) -> str:
        """Return what stands before the number of these labels' sample."""
        labels = ",".join(
            [f'{key}="{_escaped(text)}"' for key, text in zip(self._labels, values, strict=True)]
        )
        return f"{self._name}{{{labels}}} " if labels else f"{self._name} "


def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _escaped(text: str, *, with_quotes: bool = True) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n")
        return text.replace('"', '\\"') if with_quotes else text
    return text
