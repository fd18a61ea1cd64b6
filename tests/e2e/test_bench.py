"""The benchmark runs, verifies what it moves, and prints what programs can read."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Pages, Pair
from p2pkv_bench.peer import Meeting
from p2pkv_bench.peers.systems import SYSTEMS
from p2pkv_bench.rows import MIB, Spread, Target, make_row

COMMAND = (sys.executable, "-c", "from p2pkv.cli import main; main()", "bench")


def test_a_quick_run_compares_and_prints_json() -> None:
    options = [
        "--quick",
        "--only",
        "fetch",
        "--transport",
        "shm",
        "--pages",
        "64KiB",
        "--rounds",
        "1",
        "--json",
    ]
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["case"] for row in rows} == {"look-up cached", "look-up asked for"}
    for row in rows:
        assert row["page_nbytes"] == 65536
        assert row["value"]["median"] > 0
        assert [reference["name"] for reference in row["references"]] == ["memcpy", "chosen copy"]


def test_transports_are_compared_side_by_side() -> None:
    options = ["transports", "--quick", "--pages", "64KiB", "--rounds", "1", "--json"]
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"shm", "tcp"} <= {row["transport"] for row in rows}
    for row in rows:
        assert row["value"]["median"] > 0
        names = [reference["name"] for reference in row["references"]]
        assert names[:3] == (["memcpy", "1 raw stream", "2 raw streams"] if row["unit"] == "GB/s" else [])


def test_a_wrong_byte_ends_the_benchmark() -> None:
    with Meeting() as meeting, Pair(meeting, "shm", 64 * MIB) as pair:
        pages = Pages(pair, 65536)
        moves = pages.next_moves(2, 8)
        for move in moves:
            pair.node.fetch(move.keys, move.rows)
        pages.verify(moves)
        moves[1].rows[7, 65535] ^= np.uint8(1)
        with pytest.raises(BenchError, match="wrong bytes"):
            pages.verify(moves)


@pytest.mark.parametrize("option", ["--only=fetsch", "--pages=100", "--threads=0"])
def test_a_case_that_there_is_not_is_refused(option: str) -> None:
    result = subprocess.run([*COMMAND, option], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"p2pkv: {option.partition('=')[0]} takes")


def test_a_target_is_met_by_the_median_ratio_to_its_reference() -> None:
    rounds = {"p2pkv": [3.0, 1.0, 2.0], "memcpy": [2.0, 2.0, 2.0]}
    row = make_row(rounds, suite="fetch", case="", unit="GB/s", target=Target(1.0, "memcpy"))
    assert row.value == Spread(2.0, 1.0, 3.0)
    assert (row.judged, row.is_met) == (1.0, True)
    row = make_row(rounds, suite="fetch", case="", unit="GB/s", target=Target(0.9, "memcpy", at_most=True))
    assert row.is_met is False


def test_other_systems_that_are_not_here_are_named_and_p2pkv_is_compared_with_memcpy() -> None:
    options = [*("--only", "fetch"), *("--pages", "64KiB"), *("--batches", "32"), "--rounds", "1", "--json"]
    command = [sys.executable, "-m", "p2pkv_bench.peers", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["transport"], row["threads"]) for row in rows] == [
        *(("shm", 1), ("tcp", 1), ("shm", 4), ("tcp", 4))
    ]
    for row in rows:
        assert row["value"]["median"] > 0
        assert row["references"][-1]["name"] == "memcpy"
        compared = [reference["name"] for reference in row["references"]]
        for system in SYSTEMS:
            assert system.name in compared or f"{system.name} is left out" in result.stderr


def test_a_cluster_of_processes_says_what_it_holds_and_what_comes_and_goes_costs() -> None:
    options = ["processes", "--processes", "6", "--json"]
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    rows = {
        row["case"].removeprefix("6 processes: "): row["value"]
        for row in map(json.loads, result.stdout.splitlines())
    }
    assert rows["members that hold the entries of 128 pages"]["median"] == 6
    # a look-up asks each other owner once; what nobody asked for comes on top
    assert 4 <= rows["requests of a first look-up, to all others"]["median"] <= 12
    assert 1.0 <= rows["entries of the fullest, as a multiple of the mean"]["median"] < 1.5
    for what in ("a join", "a kill"):
        assert 5 < rows[f"the same, of all entries, by {what}"]["median"] < 30
    assert rows["all see one that joins after"]["median"] > 0
    assert rows["all know of a kill after"]["median"] > 0
    assert rows["descriptors a process"]["high"] < 500


@pytest.mark.timeout(900)
def test_lives_end_and_every_page_is_found_again() -> None:
    # What lives a second without a processor misses a target; of three lives the median does not.
    options = ["lives", "--kept", "2000", "--rounds", "3", "--json"]
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=800, check=False)
    assert result.returncode == 0, result.stderr
    rows = {row["case"]: row["value"]["median"] for row in map(json.loads, result.stdout.splitlines())}
    for where in ("on its own host", "from another host"):
        assert rows[f"an engine is killed while it publishes: found {where} in the end"] >= 99.0
    for node in ("the host's node is killed", "the host's node is killed, a keeper has 2,000 pages"):
        assert rows[f"{node}: another host's pages that engines find meanwhile"] >= 99.0
        assert rows[f"{node}: calls of an engine meanwhile"] > 0
        assert 0 <= rows[f"{node}: engines publish again after"] < 60
    assert rows[f"{node}: local pages that engines find meanwhile"] >= 99.0
    assert rows[f"{node}: another host finds all of its pages, since it listens, after"] >= 0
