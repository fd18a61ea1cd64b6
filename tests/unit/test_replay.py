"""``p2pkv replay``: the simulation keeps to the nodes' rules, and real nodes find what it says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pkv.errors import ConfigError
from p2pkv.parts.cache import CacheParts
from p2pkv_bench.replay.cli import main
from p2pkv_bench.replay.live import LiveCluster
from p2pkv_bench.replay.run import Size, beside, ceiling, simulate
from p2pkv_bench.replay.simulation import Cluster, Tier
from p2pkv_bench.traces import TracedRequest, read_whole_trace


def conversations(seed: int, n_requests: int) -> list[TracedRequest]:
    """Requests of users who come back with a longer prompt, behind a beginning that all share."""
    numbers = random.Random(seed)
    prompts: list[list[int]] = []
    fresh = 1000
    requests = []
    for i in range(n_requests):
        if prompts and numbers.random() < 0.6:
            prompt = prompts[-1 - min(int(numbers.expovariate(0.02)), len(prompts) - 1)]
        else:
            prompt = [0, 1]
            prompts.append(prompt)
        for _ in range(numbers.randint(1, 8)):
            prompt.append(fresh)
            fresh += 1
        requests.append(TracedRequest(tuple(prompt), 1000.0 * i))
    return requests


def test_the_page_used_longest_ago_goes() -> None:
    cluster = Cluster(1, 2)
    assert cluster.ask(0, [1]) == [0, 0, 0, 0]
    assert cluster.ask(0, [2]) == [0, 0, 0, 0]
    assert cluster.ask(0, [1]) == [1, 0, 0, 0]
    assert cluster.ask(0, [3]) == [0, 0, 0, 0]  # in the place of 2
    assert cluster.ask(0, [1]) == [1, 0, 0, 0]
    assert cluster.ask(0, [2]) == [0, 0, 0, 0]
    assert cluster.n_evicted == 2


def test_what_lies_behind_a_miss_is_of_no_use() -> None:
    cluster = Cluster(1, 10)
    cluster.ask(0, [1, 2, 3])
    assert cluster.ask(0, [1, 4, 3]) == [1, 0, 0, 0]
    assert cluster.leading(0, [1, 2, 9, 3]) == 2


def test_peers_have_what_others_published_and_reading_is_no_use_there() -> None:
    cluster = Cluster(2, 2)
    cluster.ask(0, [1])
    cluster.ask(0, [2])
    assert cluster.ask(1, [1]) == [0, 1, 0, 0]
    cluster.ask(0, [3])  # in the place of 1, which nobody of node 0 used
    assert cluster.ask(1, [1]) == [0, 0, 0, 0]
    assert cluster.ask(1, [2]) == [0, 1, 0, 0]


def test_a_disk_keeps_what_a_pool_evicted_and_gives_it_back_for_peers() -> None:
    cluster = Cluster(2, 1, 2)
    for page in (1, 2):
        cluster.ask(0, [page])
    assert cluster.ask(0, [1])[Tier.OWN_DISK] == 1
    assert cluster.ask(0, [2])[Tier.OWN_MEMORY] == 1  # its own disk is read without the pool
    assert cluster.ask(1, [1])[Tier.PEER_DISK] == 1
    assert cluster.ask(1, [1])[Tier.PEER_MEMORY] == 1
    cluster.ask(0, [3])  # on disk in the place of 1, the oldest
    cluster.ask(0, [4])
    assert cluster.ask(0, [1]) == [0, 0, 0, 0]


def test_more_memory_finds_more_up_to_the_ceiling() -> None:
    requests = conversations(1, 500)
    rates = [
        simulate(requests, Size(1, n_pages, 0), "round_robin").total.rate for n_pages in (100, 400, 10**6)
    ]
    assert rates[0] < rates[1] < rates[2] == ceiling(requests)


def test_windows_add_up() -> None:
    requests = conversations(2, 300)
    outcome = simulate(requests, Size(3, 200, 400), "prefix", 7)
    assert len(outcome.windows) == 7
    assert sum(window.n_asked for window in outcome.windows) == outcome.total.n_asked
    columns = zip(*(window.by_tier for window in outcome.windows), strict=True)
    assert tuple(map(sum, columns)) == outcome.total.by_tier


@pytest.mark.parametrize("placed", ["round_robin", "prefix", "random"])
def test_real_nodes_find_what_is_simulated(placed: str) -> None:
    requests, size = conversations(3, 600), Size(3, 500, 0)
    with LiveCluster(size, 4096, max(len(request.hash_ids) for request in requests)) as cluster:
        simulated, found = beside(requests, size, placed, cluster)
        by_tier = cluster.by_tier()
    assert sum(by_tier) >= found.n_used
    assert found.rate == pytest.approx(simulated.rate, abs=0.02)
    own = by_tier[Tier.OWN_MEMORY] / found.n_asked
    assert own == pytest.approx(simulated.share(Tier.OWN_MEMORY), abs=0.02)
    assert simulated.rate < ceiling(requests)  # something was lost, or there was nothing to compare


class PromptCluster(LiveCluster):
    """Nodes that have told of what they evicted before they are asked again.

    A page that is told of later is asked for in vain, and so are those behind it, which are found: how many depends
    on the machine.
    """

    def ask(self, node: int, pages: Sequence[int]) -> list[int]:
        caching = self._engines[node].node._parts.caching
        assert isinstance(caching, CacheParts)
        caching.announcer.tell_changed(idle=0.0, gather=0.0)
        return super().ask(node, pages)


def test_a_node_estimates_the_ceiling_that_the_trace_has() -> None:
    requests, size = conversations(5, 1500), Size(1, 300, 0)
    with PromptCluster(size, 4096, max(len(request.hash_ids) for request in requests)) as cluster:
        simulated, found = beside(requests, size, "round_robin", cluster)
        [readings] = cluster.working_sets()
    assert readings["p2pkv_hit_rate_ratio"] == pytest.approx(found.rate, abs=0.02)
    assert readings["p2pkv_hit_rate_ceiling_ratio"] == pytest.approx(ceiling(requests), abs=0.02)
    assert simulated.rate < ceiling(requests) - 0.05  # or there was nothing to estimate


def test_a_disk_that_brings_pages_back_leaves_the_estimate_as_it_is() -> None:
    requests, size = conversations(6, 600), Size(1, 300, 4096)
    with LiveCluster(size, 4096, max(len(request.hash_ids) for request in requests)) as cluster:
        beside(requests, size, "round_robin", cluster)
        [readings] = cluster.working_sets()
    assert readings["p2pkv_hit_rate_ceiling_ratio"] == pytest.approx(ceiling(requests), abs=0.02)


def test_of_several_nodes_each_says_what_its_own_memory_would_give_and_one_what_all_of_it_would() -> None:
    requests, size = conversations(7, 1500), Size(3, 150, 0)
    with LiveCluster(size, 4096, max(len(request.hash_ids) for request in requests)) as cluster:
        _, found = beside(requests, size, "prefix", cluster)
        each = cluster.working_sets()
        of_all = cluster.working_set_of_all()
    mean = sum(one["p2pkv_hit_rate_ceiling_ratio"] for one in each) / len(each)
    assert found.rate - 0.02 < mean < ceiling(requests) + 0.02
    assert found.rate - 0.02 < of_all["p2pkv_cluster_hit_rate_ratio"] < ceiling(requests)
    assert of_all["p2pkv_cluster_hit_rate_ceiling_ratio"] == pytest.approx(ceiling(requests), abs=0.02)
    assert mean < ceiling(requests) - 0.04  # or the nodes' own would do


def test_real_disks_keep_what_is_simulated() -> None:
    requests, size = conversations(3, 600), Size(3, 200, 2048)
    with LiveCluster(size, 4096, max(len(request.hash_ids) for request in requests)) as cluster:
        simulated, found = beside(requests, size, "round_robin", cluster)
        by_tier = cluster.by_tier()
    without = simulate(requests, size._replace(disk_pages=0), "round_robin").total.rate
    # A disk that is slower than so many requests a second has less; it is asked after memory, and finds some.
    assert without - 0.02 < found.rate < simulated.rate + 0.02
    assert by_tier[Tier.OWN_DISK] > 0


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_document_says_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = conversations(4, 200)
    trace = written(
        tmp_path / "trace.jsonl",
        [
            json.dumps({"timestamp": one.timestamp, "hash_ids": one.hash_ids, "chat_id": 7})
            for one in requests
        ],
    )
    size = ["--nodes", "2", "--pool-size", "1MiB", "--page-size", "4KiB", "--sizes", "0.5,2"]
    wanted = ["--windows", "3", "--json", "--live", "--plot", str(tmp_path / "plot")]
    with pytest.raises(SystemExit) as ended:
        main([str(trace), *size, *wanted])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["requests"] == 200
    assert [size["pool_size"] for size in document["sizes"]] == [2**19, 2**20, 2**21]
    expected = simulate(requests, Size(2, 256, 0), "round_robin", 3)
    assert document["sizes"][1]["rate"] == expected.total.rate
    assert [window["pages"] for window in document["windows"]] == [w.n_asked for w in expected.windows]
    assert document["live"]["simulated"]["rate"] == expected.total.rate
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert (tmp_path / "plot.svg").stat().st_size > 0


def test_what_a_token_takes_is_what_its_heads_take() -> None:
    page = (Path(__file__).parents[2] / "docs/capacity.md").read_text()
    rows = re.findall(
        r"^\| .* \| (\d+) \| (\d+)(?: x (\d+))? \| (\d+) \| ([\d.]+) MiB \|$", page, re.MULTILINE
    )
    assert len(rows) >= 10
    for layers, heads, size, nbytes, mib in rows:
        numbers = 2 * int(heads) * int(size) if size else int(heads)
        assert int(layers) * numbers * 2 == int(nbytes)
        assert f"{int(nbytes) * 64 / 2**20:.1f}" == mib


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1"),
        (['{"hash_ids": [1]}', '{"timestamp": 4}'], "line 2.*hash_ids"),
        (
            ['{"timestamp": 5, "hash_ids": [1]}', '{"timestamp": 4, "hash_ids": [1]}'],
            "request 2.*sort the trace",
        ),
        ([""], "has no requests"),
        (['{"hash_ids": ["a"]}'], "line 1.*int"),
    ],
)
def test_a_trace_that_is_none_is_named(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_whole_trace(written(tmp_path / "trace.jsonl", lines))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pool-size", "1KiB"], "--pool-size 1KiB has no room"),
        (["--sizes", "1,x"], "--sizes takes numbers"),
        (["--sizes", "0"], "above 0"),
        (["--placement", "best"], "--placement takes"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    trace = written(tmp_path / "trace.jsonl", ['{"hash_ids": [1]}'])
    with pytest.raises(ConfigError, match=said):
        main([str(trace), *arguments])
    with pytest.raises(ConfigError, match="can't read the trace"):
        main([str(tmp_path / "absent")])
