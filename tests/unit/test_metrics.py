"""What a node counts and times, and how it is shown: in two formats, whole from the start, bounded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic
from prometheus_client.utils import floatToGoString

from p2pkv import Config, Node, _native
from p2pkv.exposition import Exposition
from p2pkv.integrations.boundary import Boundary
from p2pkv.metrics import (
    FETCH_CHOICES,
    FETCH_REASONS,
    FETCH_SECONDS,
    LABELLED,
    MISSES,
    READINGS,
    BoundedPeers,
    Metrics,
)
from p2pkv.timings import _BOUNDS, OF_BYTES, Timings
from pair import Pair

DOCS = Path(__file__).parents[2] / "docs"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROMTOOL = shutil.which("promtool")


@pytest.fixture
def pair(tmp_path: Path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def _node(**more: object) -> Node:
    return Node.start(Config(node_id="n", pool_size="1MiB", buffer_size=0, metrics_port=0, **more))  # type: ignore[arg-type]


def _scrape(node: Node, accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{node.metrics_port}/metrics", headers={"Accept": accept} if accept else {}
    )
    with urllib.request.urlopen(request, timeout=10) as page:  # noqa: S310
        return page.headers["Content-Type"], page.read().decode()


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_classic(text)
        for sample in family.samples
    }


def test_both_formats_are_what_strict_parsers_take_and_say_the_same() -> None:
    with _node() as node:
        kind, classic = _scrape(node)
        assert kind.startswith("text/plain; version=0.0.4")
        kind, strict = _scrape(node, OPENMETRICS)
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(strict)}
    # a counter's time of birth is a family of its own there
    named = {family.name for family in parse_classic(classic) if not family.name.endswith("_created")}
    assert named == set(families)
    assert families["p2pkv_fetch_seconds"].type == "histogram"
    assert families["p2pkv_missed_pages"].type == "counter"
    assert "process_open_fds" in families


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_has_nothing_to_say_about_a_scrape() -> None:
    with _node() as node:
        _, text = _scrape(node)
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_other_threads_have_the_interpreter_while_a_scrape_is_made() -> None:
    metrics = Metrics()

    seen = []

    def reading() -> dict[str, float]:
        seen.append(turns)
        until = time.perf_counter() + 2e-4
        while time.perf_counter() < until:
            pass
        return {"p2pkv_members": 1}

    for _ in range(200):
        metrics.watch(reading)
    turns, is_over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.is_set():
            time.sleep(0)
            turns += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # so that nobody has it but who is let
    other = threading.Thread(target=take_turns)
    try:
        other.start()
        while not turns:
            time.sleep(0)
        Exposition(metrics).write(OPENMETRICS)
    finally:
        is_over.set()
        sys.setswitchinterval(before)
        other.join()
    assert seen[-1] > seen[0]


def test_bounds_of_buckets_are_written_as_prometheus_own_client_does() -> None:
    assert (*map(floatToGoString, _native.Timings.bounds()), "+Inf") == _BOUNDS


def test_each_scrape_has_the_numbers_of_its_time() -> None:
    metrics, values = Metrics(), iter((1, float("nan"), 2, 2, float("inf"), -1.5))
    metrics.watch(lambda: {"p2pkv_members": next(values)})
    exposition = Exposition(metrics)
    written = [re.findall(r"^p2pkv_members (.*)$", exposition.write("")[1].decode(), re.M) for _ in range(6)]
    assert written == [["1.0"], ["NaN"], ["2.0"], ["2.0"], ["+Inf"], ["-1.5"]]


def test_every_labelled_series_is_there_before_anything_has_happened() -> None:
    with _node() as node:
        found = _samples(_scrape(node)[1])
    for reason in (*MISSES, "device"):
        assert found["p2pkv_missed_pages_total", (("reason", reason),)] == 0
    for reason in ("no_room", "no_directory", "timed_out", "epoch", "changed", "device"):
        assert found["p2pkv_unpublished_pages_total", (("reason", reason),)] == 0
    for source in ("own_pool", "disk", "shm", "tcp"):
        assert found["p2pkv_fetched_pages_total", (("source", source),)] == 0
        for size in OF_BYTES.names:
            assert found["p2pkv_read_seconds_count", (("size_class", size), ("source", source))] == 0
    for source in ("own_shard", "location_cache", "peers", "earlier_owners"):
        assert found["p2pkv_looked_up_pages_total", (("source", source),)] == 0
    assert found["p2pkv_transport_fallbacks_total", (("transport", "tcp"),)] == 0
    assert found["p2pkv_engine_failures_total", ()] == 0
    for choice, reason in product(FETCH_CHOICES, FETCH_REASONS):
        assert found["p2pkv_recompute_decisions_total", (("choice", choice), ("reason", reason))] == 0
    for figure in FETCH_SECONDS:
        assert found["p2pkv_recompute_seconds_total", (("figure", figure),)] == 0


def test_a_node_says_who_it_is() -> None:
    with _node(namespace='a "b" \\c', cluster="east") as node:
        (labels,) = [
            dict(labels) for name, labels in _samples(_scrape(node)[1]) if name == "p2pkv_build_info"
        ]
    assert labels["node_id"] == "n"
    assert labels["cluster"] == "east"
    assert labels["namespace"] == 'a "b" \\c'
    assert re.match(r"\d", labels["version"])


def _counts(node: Node, name: str) -> Counter[str]:
    """Return how many observations a histogram has, by its label besides the size class."""
    counts: Counter[str] = Counter()
    for series, value in node.counters().items():
        if series.startswith(f"{name}_count{{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
            del labels["size_class"]
            counts["".join(labels.values())] += int(value)
    return counts


def test_calls_are_timed_by_what_they_did(pair: Pair) -> None:
    before = {
        node: {t.name: _counts(node, t.name) for t in node.metrics.timings.all()}
        for node in (pair.owner, pair.reader)
    }
    keys = pair.publish()
    pair.owner.fetch(keys, pair.source)
    assert pair.reader.exists(keys).all()
    assert pair.reader.fetch(keys, pair.destination).all()
    pair.reader.fetch(["nobody has it"], pair.destination[:1])

    def grown(node: Node, name: str) -> dict[str, int]:
        return dict(_counts(node, name) - before[node][name])

    assert grown(pair.owner, "p2pkv_publish_seconds") == {"": 1}
    assert grown(pair.owner, "p2pkv_fetch_seconds") == {"own_pool": 1}
    assert grown(pair.owner, "p2pkv_read_seconds") == {"own_pool": 1}
    assert grown(pair.reader, "p2pkv_exists_seconds") == {"": 1}
    assert grown(pair.reader, "p2pkv_fetch_seconds") == {"peers": 1, "nowhere": 1}
    assert sum(grown(pair.reader, "p2pkv_read_seconds").values()) == 1
    assert grown(pair.reader, "p2pkv_look_up_seconds")[""] >= 1


def test_a_fetch_from_disk_is_timed_as_such(tmp_path: Path) -> None:
    with _node(disk_size="8MiB", disk_path=str(tmp_path)) as node:
        pages = np.ones((4, 16384), np.uint8)
        node.register_memory(pages)
        node.publish(list("abcd"), pages)
        caching = node._parts.caching
        assert caching is not None
        assert caching.tier is not None
        caching.tier.flush(10.0)
        caching.pool.purge()
        assert node.fetch(list("abcd"), pages).all()
        assert _counts(node, "p2pkv_fetch_seconds") == {"disk": 1}
        assert _counts(node, "p2pkv_read_seconds") == {"disk": 1}


def test_buckets_only_grow_and_the_last_is_the_count() -> None:
    timings = Timings()
    for exponent in range(-7, 3):
        timings.exists.native.add(0, 5, 10.0**exponent)
    text = timings.exists.text().decode()
    (family,) = parse_openmetrics(text + "# EOF\n")
    buckets = [
        s.value
        for s in family.samples
        if s.name.endswith("_bucket") and s.labels["size_class"] == "up to 16 pages"
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 10
    assert buckets[0] == 3
    assert dict(timings.exists.counters())['p2pkv_exists_seconds_count{size_class="up to 16 pages"}'] == 10


@dataclass
class _Traffic:
    node_id: str
    n_pages: int
    transport: str = "tcp"

    @property
    def nbytes(self) -> int:
        return 10 * self.n_pages

    @property
    def seconds(self) -> float:
        return self.n_pages / 8

    @property
    def n_late(self) -> int:
        return 2 * self.n_pages


def test_peers_have_a_bounded_number_of_series_that_never_shrink() -> None:
    traffic = [_Traffic(f"n{i}", i) for i in range(100)]
    peers = BoundedPeers(lambda: traffic)
    total = sum(range(100))
    for _ in range(2):
        pages = peers.read()["p2pkv_peer_read_pages_total"]
        assert len(pages) == 33
        assert sum(pages.values()) == total
    assert pages["others", "tcp"] == sum(range(32, 100))
    traffic[40] = _Traffic("n40", 5)  # restarted: it was at 40
    del traffic[99]
    read = peers.read()
    assert read["p2pkv_peer_read_pages_total"]["others", "tcp"] == sum(range(32, 100)) + 5
    assert sum(read["p2pkv_peer_read_bytes_total"].values()) == 10 * (total + 5)
    assert sum(read["p2pkv_peer_read_seconds_total"].values()) == (total + 5) / 8
    assert sum(read["p2pkv_peer_late_reads_total"].values()) == 2 * (total + 5)


def test_what_peers_sent_is_shown_by_peer(pair: Pair) -> None:
    keys = pair.publish()
    assert pair.reader.fetch(keys, pair.destination).all()
    (series,) = [name for name in pair.reader.counters() if name.startswith("p2pkv_peer_read_pages_total")]
    assert f'peer="{pair.owner.node_id}"' in series


def test_failures_of_an_engines_calls_are_counted_together_from_the_start() -> None:
    metrics = Metrics()
    assert metrics.counters()["p2pkv_engine_failures_total"] == 0
    boundary = Boundary("engine", metrics)
    assert boundary.call("load", lambda: 1 // 0, miss=7) == 7
    assert metrics.counters()["p2pkv_engine_failures_total"] == 1


def test_the_age_of_what_goes_next_is_known(tmp_path: Path) -> None:
    with _node() as node:
        assert node.counters()["p2pkv_pool_next_out_age_seconds"] == 0
        pages = np.ones((1, 4096), np.uint8)
        node.register_memory(pages)
        node.publish(["k"], pages)
        assert 0 < node.counters()["p2pkv_pool_next_out_age_seconds"] < 60


def test_the_shares_of_the_ring_add_up(pair: Pair) -> None:
    shares = [node.counters()["p2pkv_ring_share_ratio"] for node in (pair.owner, pair.reader)]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.2


def test_the_reference_names_every_metric() -> None:
    metrics = Metrics()
    rows = dict(READINGS)
    rows |= {name: text for name, (text, _) in LABELLED.items()}
    rows |= {family.name: family.help for family in metrics.families()}
    rows |= {timing.name: timing.help for timing in metrics.timings.all()}
    said = dict(
        re.findall(r"^\| `(p2pkv_\w+)[^`]*` \| (.*?) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    )
    assert said == rows
