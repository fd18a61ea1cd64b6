"""The doctor's self-test notices a transport that does not do what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import run

from p2pkv import Node
from p2pkv.cli.doctor.disk import examine_disk
from p2pkv.cli.doctor.finding import Verdict, size
from p2pkv.cli.doctor.selftest import read_from_itself
from p2pkv.config import Config
from p2pkv.disk.store import DiskOptions, DiskStore
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.native import ShmTransport, TcpTransport


@pytest.mark.parametrize("kind", [ShmTransport, TcpTransport])
def test_a_transport_that_works_is_said_to(kind: type[ShmTransport | TcpTransport]) -> None:
    transport = kind()
    assert "read from itself and right" in read_from_itself(transport)
    transport.close()


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (Faults(corrupt=True), "have wrong bytes"),
        (Faults(reject=True), "ended as REJECTED"),
        (Faults(lose_peer_after=0), "ended as PEER_LOST"),
        (Faults(unvalidated=True), "was not rejected"),
    ],
    ids=["corrupt", "reject", "lost", "unvalidated"],
)
def test_a_transport_that_does_not_is_found_out(faults: Faults, says: str) -> None:
    transport = FaultyTransport(TcpTransport(), faults)
    with pytest.raises(TransportError, match=says):
        read_from_itself(transport)
    transport.close()


def test_findings_can_be_read_by_programs() -> None:
    result = run("doctor", "--jsonl")
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"transport shm", "transport tcp", "transport verbs", "UCX", "GPU"} <= {
        finding["what"] for finding in findings
    } | {"UCX"}
    assert all(set(finding) == {"verdict", "what", "says", "advice"} for finding in findings)


def test_the_disk_is_tried_out_and_left_alone(tmp_path: Path) -> None:
    disk = Config(node_id="n1", disk_path=str(tmp_path / "disk"), disk_size="1GiB")
    finding = examine_disk(disk)
    assert finding.verdict is Verdict.GOOD, finding
    for part in (disk.disk_path or "", "layout bucket, 1.0 GiB", "free", "compression off"):
        assert part in finding.says
    assert "io_uring" in finding.says or "threads" in finding.says
    assert list(tmp_path.iterdir()) == []
    assert "off" in examine_disk(Config()).says


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def with_a_strangers_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "photos").mkdir()


def of_another_cluster(folder: Path) -> None:
    store = DiskStore(
        str(folder), DiskOptions(capacity=8 << 20), node_id="n1", namespace="default", cluster="c2"
    )
    assert store.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (open_to_others, "has mode 0777"),
        (with_a_strangers_file, "holds 'photos'"),
        (of_another_cluster, "is the store of cluster 'c2'"),
        (lambda folder: folder.touch(), "is no folder"),
    ],
    ids=["mode", "strangers", "cluster", "file"],
)
def test_a_folder_that_no_node_would_take_is_bad(
    make: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    make(tmp_path / "disk")
    config = Config(node_id="n1", listen="127.0.0.1:0", disk_path=str(tmp_path / "disk"), disk_size="8MiB")
    finding = examine_disk(config)
    assert finding.verdict is Verdict.BAD
    assert says in finding.says
    with pytest.raises(ConfigError, match=re.escape(says)):
        Node.start(config)


def test_a_disk_without_room_is_said_to_be(tmp_path: Path) -> None:
    finding = examine_disk(Config(node_id="n1", disk_path=str(tmp_path), disk_size="100000TiB"))
    assert finding.verdict is Verdict.NOTE
    assert "lower disk_size" in finding.advice


def test_a_folder_that_a_node_could_not_make_is_said_to_be_missing(tmp_path: Path) -> None:
    finding = examine_disk(Config(node_id="n1", disk_path=str(tmp_path / "no" / "disk"), disk_size="8MiB"))
    assert finding.verdict is Verdict.NOTE, "a node starts, and works without its disk"
    assert f"{tmp_path / 'no'} is no folder" in finding.says


@pytest.mark.parametrize(("nbytes", "said"), [(1 << 30, "1.0 GiB"), (32 << 20, "32.0 MiB"), (0, "0.0 MiB")])
def test_small_sizes_are_said_so_that_they_can_be_told_apart(nbytes: int, said: str) -> None:
    assert size(nbytes) == said
