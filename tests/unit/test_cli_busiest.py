"""Hot pages and slow peers, as ``p2pkv top`` and ``status`` name them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from p2pkv import Config, Node
from p2pkv.cli import app
from p2pkv.cli.busiest import Counters, hot_pages, lines, slow_peers
from p2pkv.explain.messages import MOST_HOT_PAGES, Answer, HotPage, Question
from pair import Pair


def of_peer(
    peer: str, pages: float, seconds: float, late: float = 0, transport: str = "shm"
) -> dict[str, float]:
    labels = f'{{peer="{peer}",transport="{transport}"}}'
    return {
        f"p2pkv_peer_read_pages_total{labels}": pages,
        f"p2pkv_peer_read_bytes_total{labels}": 65536 * pages,
        f"p2pkv_peer_read_seconds_total{labels}": seconds,
        f"p2pkv_peer_late_reads_total{labels}": late,
    }


def names(now: Counters, before: Counters | None = None) -> list[str]:
    return [peer.node_id for peer in slow_peers(now, before or {})]


ALIKE = of_peer("a", 1000, 1.0) | of_peer("b", 500, 0.6) | of_peer("c", 800, 0.7)


def test_peers_that_are_alike_are_not_slow() -> None:
    assert names({"reader": ALIKE, "other": of_peer("a", 100, 0.1)}) == []


def test_a_peer_that_takes_several_times_as_long_as_others_is_slow() -> None:
    (slow,) = slow_peers({"reader": ALIKE | of_peer("b", 500, 5.0)}, {})
    assert (slow.node_id, slow.transport) == ("b", "shm")
    assert slow.times == pytest.approx(10.7, rel=0.05)
    assert slow.seconds_a_gib == pytest.approx(5.0 / (500 * 65536) * 2**30)


def test_a_peer_over_another_transport_is_not_compared_with_those_over_this_one() -> None:
    assert names({"reader": ALIKE | of_peer("d", 500, 5.0, transport="tcp")}) == []


def test_a_peer_that_is_late_is_slow_though_nothing_came_of_it() -> None:
    (slow,) = slow_peers({"reader": ALIKE | of_peer("d", 0, 3.0, late=30)}, {})
    assert (slow.node_id, slow.times, slow.late_reads) == ("d", 0.0, 30)
    assert "30 reads over shm were late" in "".join(map(str, lines([], [slow])))


def test_what_was_before_the_reading_before_counts_no_more() -> None:
    before = {"reader": ALIKE | of_peer("b", 500, 5.0)}
    after = {"reader": of_peer("a", 2000, 2.0) | of_peer("b", 1500, 6.0) | of_peer("c", 1800, 1.7)}
    assert names(before) == ["b"]
    assert names(after, before) == []
    restarted = {"reader": of_peer("a", 100, 0.1) | of_peer("b", 100, 1.0) | of_peer("c", 100, 0.1)}
    assert names(restarted, after) == ["b"]


def test_few_pages_and_peers_without_a_name_say_nothing() -> None:
    assert names({"reader": ALIKE | of_peer("d", 2, 1.0) | of_peer("others", 500, 9.0)}) == []


def test_pages_that_several_nodes_fetch_are_one() -> None:
    one, two = bytes(16), bytes([1] * 16)
    answers = [
        Answer("x", "", 0, hot_pages=(HotPage(one, 5.0), HotPage(two, 4.0))),
        Answer("y", "", 0, hot_pages=(HotPage(two, 3.0),)),
    ]
    hot = hot_pages(answers)
    assert [(page.id, page.rate, page.nodes) for page in hot] == [
        (two.hex(), 7.0, ["x", "y"]),
        (one.hex(), 5.0, ["x"]),
    ]
    assert f"{two.hex()}  7.0 fetches/s by x, y" in "\n".join(map(str, lines(hot, [])))


@pytest.mark.parametrize("command", ["status", "top"])
def test_the_page_that_is_fetched_most_is_named_and_can_be_explained(tmp_path: Path, command: str) -> None:
    pair = Pair(tmp_path)
    try:
        keys = pair.publish()
        for _ in range(20):
            assert pair.reader.fetch(keys[:1], pair.destination[:1]).all()
        assert pair.reader.fetch(keys, pair.destination).all()
        options = ["--join", pair.owner.address, "--set", f"secret_file={tmp_path / 'secret'}"]
        answered = CliRunner().invoke(app, [command, *options, "--json"])
        assert answered.exit_code == 0, answered.output
        document = json.loads(answered.output)
        (reading,) = document["readings"] if command == "top" else [document]
        hottest = reading["hot_pages"][0]
        assert hottest["nodes"] == ["reader"]
        assert hottest["rate"] > 1.0
        assert reading["slow_peers"] == []
        explained = CliRunner().invoke(app, ["explain", "--id", hottest["id"], *options, "--jsonl"])
        parts = [json.loads(line) for line in explained.output.splitlines()]
        assert (parts[0]["part"], parts[0]["verdict"]) == ("page", "in_pool")
        assert {"part": "places", "node_id": "owner"}.items() <= parts[1].items()
        shown = CliRunner().invoke(app, [command, *options, *(["--count", "1"] if command == "top" else [])])
        assert hottest["id"] in shown.output
        expected = pair.owner.explain(keys[0])
        assert expected.page_id == hottest["id"]
    finally:
        pair.close()


def test_a_node_tells_of_no_more_pages_than_it_should(tmp_path: Path) -> None:
    with Node.start(Config(node_id="n", pool_size="1MiB", buffer_size=0)) as node:
        pages = np.ones((100, 4096), np.uint8)
        node.register_memory(pages)
        keys = [f"page-{i}" for i in range(100)]
        node.publish(keys, pages)
        assert node.fetch(keys, pages).all()
        caching = node._parts.caching
        assert caching is not None
        assert len(caching.cache.hot_pages(1000)) == 100
        assert len(node._parts.witness.tell(Question(hot_pages=1000)).hot_pages) == MOST_HOT_PAGES
        assert node._parts.witness.tell(Question(hot_pages=-1)).hot_pages == ()
