"""The serving benchmark's load and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pkv.errors import ConfigError
from p2pkv_bench.serving.cli import named
from p2pkv_bench.serving.client import Answer
from p2pkv_bench.serving.counters import grown, overhead, pages
from p2pkv_bench.serving.figures import Promise, figures
from p2pkv_bench.serving.workload import Load, arrivals


def test_a_round_is_the_same_for_every_target_but_for_its_beginning() -> None:
    load = Load(rate=10.0, n_requests=50)
    ours, theirs = arrivals(load, 3, "ours "), arrivals(load, 3, "theirs ")
    assert [(one.at, one.prompt[5:]) for one in ours] == [(one.at, one.prompt[7:]) for one in theirs]
    assert arrivals(load, 4, "ours ") != ours
    assert 2.0 < ours[-1].at < 12.0  # 50 at 10 a second


def test_bursts_arrive_together() -> None:
    times = [one.at for one in arrivals(Load(rate=10.0, n_requests=20, burst=5), 0, "")]
    assert len(set(times)) == 4


def test_requests_of_a_trace_share_text_exactly_as_they_share_hashes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 3, "output_length": 100, "hash_ids": ids}
        for ids in ([0, 1, 2], [0, 1, 3], [4])
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    load = Load(rate=1.0, n_requests=3, trace=trace, block=64, output_share=0.1)
    first, second, third = arrivals(load, 0, "")
    assert first.prompt[:128] == second.prompt[:128]
    assert first.prompt[128:] != second.prompt[128:]
    assert not third.prompt.startswith(first.prompt[:8])
    assert first.n_new == 10
    with pytest.raises(ConfigError, match="round 1"):
        arrivals(load, 1, "")


def test_goodput_counts_those_that_kept_the_promise() -> None:
    answers = [
        Answer(2, first=0.1, last=0.2, gaps=[0.1], n_tokens=2),
        Answer(2, first=2.0, last=2.1, gaps=[0.1], n_tokens=2),
        Answer(2, first=0.1, last=3.0, gaps=[2.9], n_tokens=2),
        Answer(2, error="status 500"),
    ]
    found = figures("x", answers, 2.0, Promise(1.0, 0.5), {"shm": 3.0, "computed": 1.0}, {})
    assert found.goodput == 0.5
    assert found.n_errors == 1
    assert found.hit_rate == 0.75
    assert found.first_token[50] == pytest.approx(0.1)


def test_counters_are_read_by_what_they_grew() -> None:
    name = "p2pkv_proxy_overhead_seconds"
    before = {'p2pkv_fetched_pages_total{source="shm"}': 5.0, f"{name}_count": 10.0}
    after = {
        'p2pkv_fetched_pages_total{source="shm"}': 9.0,
        "p2pkv_published_pages_total": 2.0,
        f"{name}_count": 110.0,
        f"{name}_sum": 0.05,
        name + '_bucket{le="0.001"}': 98.0,
        name + '_bucket{le="0.002"}': 99.0,
        name + '_bucket{le="+Inf"}': 100.0,
    }
    growth = grown(before, after)
    assert pages(growth) == {"shm": 4.0, "computed": 2.0}
    assert overhead(growth) == {"mean": 0.0005, "p99_below": 0.002}


def test_a_target_has_a_name_and_one_or_more_addresses() -> None:
    one, four = named(["http://a:1/", "four, told=http://b:1,http://b:2/"], "m")
    assert (one.name, one.urls) == ("http://a:1/", ("http://a:1",))
    assert (four.name, four.urls, four.model) == ("four, told", ("http://b:1", "http://b:2"), "m")
    with pytest.raises(ConfigError, match="a name of its own"):
        named(["a=http://b", "a=http://c"], "")
