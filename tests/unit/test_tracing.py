"""Spans: what a call took, told to a collector, as children of the engine's own spans."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from p2pkv import Config, ConfigError, Node, UsageError
from p2pkv.exposition import Exposition
from p2pkv.timings import Timings
from p2pkv.tracing import about
from spans import exported_to
from transfer_pair import spans_of

PAGE = 4096
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Collector(HTTPServer):
    """Takes what an OTLP exporter sends over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests have nothing to say on stderr."""


@pytest.fixture(scope="module")
def running() -> Iterator[Collector]:
    """A collector that the process's spans go to."""
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{server.server_port}/v1/traces", timeout=30)
    with exported_to(exporter):
        yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def collector(running: Collector) -> Collector:
    running.spans.clear()
    return running


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    disk = str(tmp_path / "disk")
    owner = Config(node_id="a", pool_size="64KiB", tracing=True, disk_size="8MiB", disk_path=disk)
    with (
        Node.start(owner) as first,
        Node.start(Config(node_id="b", join=first.address, pool_size="1MiB", tracing=True)) as second,
    ):
        yield first, second


def attributes(span: Span) -> dict[str, object]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


def pages(node: Node, n: int) -> np.ndarray:
    array = np.ones((n, PAGE), np.uint8)
    node.register_memory(array, readable=True)
    return array


def test_a_fetch_says_what_it_took_within_the_engines_span(
    nodes: tuple[Node, Node], collector: Collector
) -> None:
    first, second = nodes
    assert first.publish(["x", "y"], pages(first, 2), timeout=30).all()
    with (
        trace.get_tracer("engine").start_as_current_span("request") as engine,
        about("request-17"),
    ):
        found = second.fetch(["x", "y", "z"], pages(second, 3), timeout=30)
    assert found.tolist() == [1, 1, 0]
    [publish], [fetch] = collector.named("p2pkv.publish"), collector.named("p2pkv.fetch")
    assert attributes(publish) == {
        "p2pkv.node": "a",
        "p2pkv.namespace": "default",
        "p2pkv.pages": 2,
        "p2pkv.hits": 2,
    }
    assert attributes(fetch) == {
        "p2pkv.node": "b",
        "p2pkv.namespace": "default",
        "p2pkv.request": "request-17",
        "p2pkv.pages": 3,
        "p2pkv.hits": 2,
    }
    assert int.from_bytes(fetch.parent_span_id) == engine.get_span_context().span_id
    for step in ("look_up", "promote", "read"):
        spans = collector.named(f"p2pkv.{step}")
        assert spans
        for span in spans:
            assert span.parent_span_id == fetch.span_id
            assert fetch.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= fetch.end_time_unix_nano


def test_a_hand_off_names_its_request_on_both_sides(nodes: tuple[Node, Node], collector: Collector) -> None:
    prefill, decode = nodes
    source, target = pages(prefill, 4), pages(decode, 4)
    target[:] = 0
    prefill.transfers.offer("request-5", spans_of(source))
    decode.transfers.get("a", "request-5", spans_of(target), timeout=30)
    assert target.all()
    [offer], [get] = collector.named("p2pkv.offer"), collector.named("p2pkv.get")
    assert attributes(offer)["p2pkv.request"] == attributes(get)["p2pkv.request"] == "request-5"
    assert attributes(offer)["p2pkv.offer"] == attributes(get)["p2pkv.offer"] == "request-5"
    assert attributes(get)["p2pkv.peer"] == "a"


def test_a_hand_off_of_an_engine_names_the_engines_request(
    nodes: tuple[Node, Node], collector: Collector
) -> None:
    with about("request-of-the-engine"):
        nodes[0].transfers.offer("drawn by chance", spans_of(pages(nodes[0], 1))).withdraw()
    [offer] = collector.named("p2pkv.offer")
    assert attributes(offer)["p2pkv.request"] == "request-of-the-engine"
    assert attributes(offer)["p2pkv.offer"] == "drawn by chance"


def test_a_call_for_several_requests_names_all_and_no_exemplar_any(
    nodes: tuple[Node, Node], collector: Collector
) -> None:
    with about("request-1", "request-2"):
        nodes[1].fetch(["a page that nobody has"], pages(nodes[1], 1), timeout=30)
        found = nodes[1].whereabouts(["a page that nobody has"], timeout=30)
    assert not found.outcomes.any()
    for name in ("p2pkv.fetch", "p2pkv.whereabouts"):
        [span] = collector.named(name)
        [requests] = [one.value.array_value for one in span.attributes if one.key == "p2pkv.requests"]
        assert [value.string_value for value in requests.values] == ["request-1", "request-2"]
        assert "p2pkv.request" not in attributes(span)
    assert "request-" not in Exposition(nodes[1].metrics).write(OPENMETRICS)[1].decode()


def test_what_a_call_raises_is_in_its_span(nodes: tuple[Node, Node], collector: Collector) -> None:
    with pytest.raises(UsageError):
        nodes[0].publish([], np.ones((0, PAGE), np.uint8))
    [span] = collector.named("p2pkv.publish")
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.events[0].name == "exception"


@pytest.mark.parametrize("keys", [None, 5, "abc"])
def test_wrong_calls_are_refused_as_without(
    nodes: tuple[Node, Node], collector: Collector, keys: Any
) -> None:
    page = pages(nodes[1], 1)
    with pytest.raises(UsageError), Node.start(Config(pool_size="64KiB")) as plain:
        plain.fetch(keys, page)
    with pytest.raises(UsageError):
        nodes[1].fetch(keys, page)
    with pytest.raises(TypeError, match=r"Transfers\.get\(\) missing"):
        nodes[1].transfers.get("a")  # type: ignore[call-arg]
    assert collector.named("p2pkv.fetch")


def test_nothing_is_wrapped_unless_asked_for() -> None:
    with Node.start(Config(pool_size="64KiB")) as node:
        assert "fetch" not in vars(node._cache)
        assert "offer" not in vars(node.transfers)


def test_without_the_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'p2pkv\[tracing\]'"):
        Node.start(Config(pool_size="64KiB", tracing=True))


@pytest.mark.usefixtures("running")
def test_a_request_is_named_where_its_call_was_counted(nodes: tuple[Node, Node]) -> None:
    _, reader = nodes
    pages = np.zeros((1, PAGE), np.uint8)
    with reader.register_memory(pages), about('request "17"'):
        reader.fetch(["a page that nobody has"], pages)
    found = [
        sample
        for family in text_string_to_metric_families(
            Exposition(reader.metrics).write(OPENMETRICS)[1].decode()
        )
        for sample in family.samples
        if sample.exemplar is not None
    ]
    [sample] = found
    assert sample.name == "p2pkv_fetch_seconds_bucket"
    assert sample.labels["farthest"] == "nowhere"
    assert sample.exemplar.labels["request_id"] == 'request "17"'
    assert len(sample.exemplar.labels["trace_id"]) == 32
    assert 0 < sample.exemplar.value <= float(sample.labels["le"])
    assert "request_id" not in Exposition(reader.metrics).write("")[1].decode()  # the classic format has none


def test_no_request_is_named_where_another_call_was_counted_meanwhile() -> None:
    timings = Timings()
    for _ in range(2):
        note = timings.watch("exists")
        assert note is not None
        timings.exists.native.add(0, 5, 1e-9)
        timings.exists.native.add(0, 500, 1e-9)
        note({"request_id": "one of two"})
    assert "one of two" not in timings.exists.text(with_exemplars=True).decode()
    note = timings.watch("exists")
    assert note is not None
    note({"request_id": "none"})  # as a call that was refused
    assert "none" not in timings.exists.text(with_exemplars=True).decode()


def test_labels_that_are_too_long_are_left_out() -> None:
    timings = Timings()
    for labels in ({"request_id": "x" * 200}, {"request_id": "y" * 100, "trace_id": "z" * 32}):
        note = timings.watch("exists")
        assert note is not None
        timings.exists.native.add(0, 5, 1e-9)
        note(labels)
    text = timings.exists.text(with_exemplars=True).decode()
    assert "xx" not in text
    assert "yy" in text
    assert "zz" not in text
