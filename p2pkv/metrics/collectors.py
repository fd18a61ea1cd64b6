"""What parts of a node say when they are asked, as the registry takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pkv.metrics.tables import LABELLED, READINGS

Readings = Callable[[], Mapping[str, float]]
LabelledReadings = Callable[[], Mapping[str, Mapping[tuple[str, ...], float]]]


class ReadingsCollector(Collector):
    """Shows what ``read`` returns under the names of :data:`READINGS`."""

    def __init__(self, read: Readings) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name.removesuffix("_total"), READINGS[name], value=value)


class LabelledCollector(Collector):
    """Shows what ``read`` returns, by metric and labels, under the names of :data:`LABELLED`."""

    def __init__(self, read: LabelledReadings) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, by_labels in self._read().items():
            help_text, labels = LABELLED[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), help_text, labels=labels)
            for values, value in by_labels.items():
                family.add_metric(values, value)
            yield family
