"""A node and an engine that attaches to it, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from p2pkv import Config, Node
from p2pkv.tracing import about
from spans import exported_to

KEYS = ["a", "b"]


def test_calls_of_an_attached_engine_have_spans(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, 4096), np.uint8)
    exporter = InMemorySpanExporter()
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")),
        Node.start(Config(node_id="engine", attach=path, tracing=True)) as engine,
        exported_to(exporter),
        about("request-17"),
    ):
        engine.register_memory(pages)
        assert engine.publish(KEYS, pages, timeout=20.0).all()
        assert engine.fetch(KEYS, pages, timeout=20.0).all()
        told = {
            (span.name, span.attributes["p2pkv.node"], span.attributes["p2pkv.request"])
            for span in exporter.get_finished_spans()
            if span.attributes is not None
        }
    assert {("p2pkv.publish", "engine", "request-17"), ("p2pkv.fetch", "engine", "request-17")} <= told


def test_a_bump_holds_at_once_for_an_engine_that_has_asked_nobody(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, 4096), np.uint8)
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")) as host,
        Node.start(Config(attach=path)) as engine,
    ):
        engine.register_memory(pages)
        engine._parts.epochs.close()  # what asks the members once a second
        assert engine.publish(KEYS, pages, timeout=20.0).all()
        assert engine.exists(KEYS, timeout=20.0).all()
        host.bump(timeout=20.0)
        assert not engine.exists(KEYS, timeout=20.0).any()
        assert engine.epoch == host.epoch > 0
