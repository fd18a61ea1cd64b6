"""Every metric the router has, declared once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pkv.instances.heartbeat import State
from p2pkv_proxy.breaker import Phase
from p2pkv_proxy.registry import Registry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1)
OUTCOMES = (
    "ok",
    "client_error",
    "engine_error",
    "refused",
    "denied",
    "timed_out",
    "client_gone",
    "broken_off",
)
"""``broken_off``: the answer had begun when its instance was lost. ``denied``: without a key that the router knows."""

FAULTS = frozenset({"engine_error", "refused", "timed_out", "broken_off"})
"""Outcomes that are not the client's doing."""
RESUMPTIONS = ("resumed", "completed", "failed", "unsuited")
"""``resumed``: another instance went on. ``completed``: only the end was missing. ``failed``: no other did it.
``unsuited``: it is no stream that can be continued."""


class Metrics:
    """The router's counters, in a registry of its own."""

    def __init__(self, instances: Registry) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "p2pkv_proxy_requests", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.choices = Counter(
            "p2pkv_proxy_choices",
            "Pairs chosen, by the policies' reasons: prefill/decode",
            ["reason"],
            registry=self.registry,
        )
        self.pairs = Counter(
            "p2pkv_proxy_pairs", "Pairs chosen", ["prefill", "decode"], registry=self.registry
        )
        self.retries = Counter(
            "p2pkv_proxy_retries", "Requests tried on another pair", registry=self.registry
        )
        self.refused_retries = Counter(
            "p2pkv_proxy_refused_retries",
            "Requests not tried again because too many were",
            registry=self.registry,
        )
        self.resumptions = Counter(
            "p2pkv_proxy_resumed_streams",
            "Streams whose instance failed in the middle, by what became of them",
            ["outcome"],
            registry=self.registry,
        )
        self.page_reports = Counter(
            "p2pkv_proxy_page_reports",
            "What engines said of prompts' pages: taken, or refused because it can't be",
            ["outcome"],
            registry=self.registry,
        )
        self.first_byte = self._histogram(
            "first_byte", "From a request's end to its answer's first byte", _SECONDS
        )
        self.duration = self._histogram(
            "request", "From a request's first byte to its answer's last", _SECONDS
        )
        self.overhead = self._histogram(
            "overhead", "Of the time to the first byte, what the router took itself", _SHORT_SECONDS
        )
        self.queued = self._histogram(
            "queued", "Waiting for an instance with room, of those that had to", _SECONDS
        )
        self.waiting = Gauge(
            "p2pkv_proxy_queued_requests",
            "Requests that wait for an instance with room",
            registry=self.registry,
        )
        self.dropped_lines = Counter(
            "p2pkv_proxy_dropped_log_lines",
            "Lines of the access log that could not be written",
            registry=self.registry,
        )
        self.ended_idle = Counter(
            "p2pkv_proxy_ended_idle_connections",
            "Clients' connections without a request that were ended to make room for others",
            registry=self.registry,
        )
        self.reloads = Counter(
            "p2pkv_proxy_reloads",
            "Files read again: taken, or refused because they can't be used",
            ["file", "outcome"],
            registry=self.registry,
        )
        self.refused_files = Gauge(
            "p2pkv_proxy_refused_files",
            "Files whose present content can't be used: what they said before is in force",
            registry=self.registry,
        )
        self.lookup = self._histogram("lookup", "Asking the directory", _SHORT_SECONDS)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for outcome in RESUMPTIONS:
            self.resumptions.labels(outcome)
        self._chosen: set[tuple[str, str]] = set()
        instances.on_gone.append(self._forget)
        self.registry.register(_Instances(instances))

    def chose(self, prefill: str, decode: str) -> None:
        """Count a pair."""
        self._chosen.add((prefill, decode))
        self.pairs.labels(prefill, decode).inc()

    def _forget(self, instance: str) -> None:
        """Drop the pairs of an instance that is gone: where they come and go they would grow without end."""
        for pair in [pair for pair in self._chosen if instance in pair]:
            self._chosen.discard(pair)
            self.pairs.remove(*pair)

    def _histogram(self, what: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"p2pkv_proxy_{what}_seconds", help_text, buckets=buckets, registry=self.registry)


class _Instances(Collector):
    """What the registry knows of each instance."""

    def __init__(self, instances: Registry) -> None:
        self._instances = instances

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        labels = ["instance", "role"]
        up = GaugeMetricFamily("p2pkv_proxy_instance_ready", "1 while it takes requests", labels=labels)
        requests = GaugeMetricFamily(
            "p2pkv_proxy_instance_requests", "Requests of this router it has", labels=labels
        )
        tokens = GaugeMetricFamily("p2pkv_proxy_instance_tokens", "Tokens of those requests", labels=labels)
        opened = CounterMetricFamily(
            "p2pkv_proxy_instance_opened_breakers", "Times its circuit breaker opened", labels=labels
        )
        waiting = GaugeMetricFamily(
            "p2pkv_proxy_instance_waiting_requests", "Of these, those without a first byte", labels=labels
        )
        queue = GaugeMetricFamily(
            "p2pkv_proxy_instance_queue_seconds",
            "Until its prompts that wait have their first tokens, as predicted",
            labels=labels,
        )
        beside_requests = GaugeMetricFamily(
            "p2pkv_proxy_instance_replica_requests",
            "Requests it has of the routers beside this one, as they say",
            labels=labels,
        )
        beside_tokens = GaugeMetricFamily(
            "p2pkv_proxy_instance_replica_tokens", "Tokens of those requests", labels=labels
        )
        now = time.monotonic()
        for tracked in self._instances:
            values = [tracked.id, tracked.instance.role.value]
            is_ready = tracked.state is State.READY and tracked.breaker.phase is Phase.CLOSED
            up.add_metric(values, float(is_ready))
            requests.add_metric(values, tracked.in_flight)
            tokens.add_metric(values, tracked.n_tokens)
            waiting.add_metric(values, tracked.n_waiting)
            beside_requests.add_metric(values, tracked.n_requests_replicas)
            beside_tokens.add_metric(values, tracked.n_tokens_replicas)
            queue.add_metric(values, tracked.own_queue(now))
            opened.add_metric(values, tracked.breaker.opened)
        gone = GaugeMetricFamily(
            "p2pkv_proxy_gone_instance_timestamp_seconds",
            "When one of the last hundred instances that went did so, and why",
            labels=[*labels, "reason"],
        )
        for one in self._instances.gone.values():
            gone.add_metric([one.instance.id, one.instance.role.value, one.why], one.at)
        expired = CounterMetricFamily(
            "p2pkv_proxy_expired_instances", "Instances that were not heard of in time"
        )
        expired.add_metric([], self._instances.expired)
        refused = CounterMetricFamily(
            "p2pkv_proxy_refused_heartbeats", "Late, repeated or malformed heartbeats"
        )
        refused.add_metric([], self._instances.refused)
        strangers = CounterMetricFamily(
            "p2pkv_proxy_refused_strangers", "Connections for heartbeats with a wrong key, or none"
        )
        strangers.add_metric([], self._instances.strangers())
        replicas = GaugeMetricFamily("p2pkv_proxy_replicas", "Routers beside this one that are heard")
        replicas.add_metric([], self._instances.n_replicas)
        beside = [beside_requests, beside_tokens, replicas]
        return [up, requests, tokens, waiting, queue, opened, gone, expired, refused, strangers, *beside]


_THE_SAME = (
    "instance_ready",
    "expired_instances",
    "refused_heartbeats",
    "refused_strangers",
    "refused_files",
    "_created",
    "gone_instance",
    "replica",
)
"""Parts of the names of what every worker counts alike, or what is a time: of these the largest is true."""


def merged(pages: Sequence[str]) -> str:
    """Return one page of metrics for several processes': the sum of each sample."""
    families: dict[str, dict[str, float]] = {}
    comments: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                comments.setdefault(family, [])
                families.setdefault(family, {})
            if line.startswith("#"):
                if line not in comments[family]:
                    comments[family].append(line)
                continue
            name, _, text = line.rpartition(" ")
            samples, value = families[family], float(text)
            is_same = any(part in family for part in _THE_SAME)
            before = samples.get(name, 0.0)
            samples[name] = max(before, value) if is_same else before + value
    lines = []
    for family, samples in families.items():
        lines += comments[family]
        lines += [f"{name} {value!r}" for name, value in samples.items()]
    return "\n".join([*lines, ""])
