"""Nodes over NCCL in processes of their own, on one GPU: with two ranks on it, or each as if on another host.

On a real device ``P2PKV_TEST_NCCL`` is the path of a libnccl, if that of the packages is too old for two ranks on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, NodeProcess, eventually
from fake_nccl import fake_nccl
from torn_reads import hunt

SIZES = [16 << 10, 64 << 10, 256 << 10]
_SECONDS = 100.0
"""For a hunt: NCCL takes seconds to connect two processes."""
_LIBRARY = os.environ.get("P2PKV_TEST_NCCL", "auto")
_VERSION = """
import sys
from p2pkv import _native
from p2pkv.transports import nccl
print(nccl.missing_library(sys.argv[1]) or _native.nccl_library()[1])
"""


class Ranks(Cluster):
    """Nodes whose processes find what lets NCCL have several ranks on one GPU in their environment.

    ``as_one_host``: NCCL is allowed to. Else each process says that it is on another host, which NCCL believes.
    """

    def __init__(self, *, as_one_host: bool, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._as_one_host = as_one_host

    def spawn(self, node_id: str, **options: Any) -> NodeProcess:
        own = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self._as_one_host else {"NCCL_HOSTID": node_id}
        with pytest.MonkeyPatch.context() as environ:
            for name, value in (own | {"NCCL_SOCKET_IFNAME": "lo"}).items():
                environ.setenv(name, value)
            return super().spawn(node_id, **options)


def _refuses_two_ranks() -> str:
    """Return why the real NCCL does not have two ranks on a GPU, or nothing."""
    told = subprocess.run(
        [sys.executable, "-c", _VERSION, _LIBRARY], capture_output=True, text=True, check=True
    ).stdout.strip()
    numbers = told.split(".")
    if not all(number.isdigit() for number in numbers):
        return told
    return (
        ""
        if (int(numbers[0]), int(numbers[1])) >= (2, 30)
        else f"NCCL {told} has one rank on a GPU; 2.30 has several"
    )


@pytest.fixture(params=["two ranks on a GPU", "as if on two hosts"])
def ranks(request: pytest.FixtureRequest, kind: str, cuda_settings: dict[str, object]) -> Iterator[Ranks]:
    as_one_host = request.param == "two ranks on a GPU"
    options: dict[str, Any] = dict(cuda_settings)
    library = fake_nccl().path if kind == "emulated" else _LIBRARY
    options["transport_options"] = {"nccl": {"library": library}}
    if kind != "emulated" and as_one_host and (reason := _refuses_two_ranks()):
        pytest.skip(reason)
    with Ranks(as_one_host=as_one_host, **options) as ranks:
        yield ranks


def test_no_hit_over_nccl_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    n_hits, n_wrong = hunt(ranks, tmp_path, "nccl", SIZES, hits=500, seconds=_SECONDS)
    assert n_wrong == 0
    assert n_hits >= 500, "too few hits to prove anything"


def test_a_killed_owner_over_nccl_costs_misses_by_the_deadline(ranks: Ranks) -> None:
    owner, reader = (ranks.start(name, transports=["nccl"]) for name in ("owner", "reader"))
    ranks.meet(owner, reader)
    keys = [f"page {i}" for i in range(16)]
    assert all(owner.call("publish", keys=keys, nbytes=64 << 10))

    def is_fetched() -> bool:
        found = reader.call("fetch", keys=keys, nbytes=64 << 10)
        assert found["wrong"] == []
        return all(found["hits"])

    eventually(is_fetched, 60.0)
    owner.kill()
    found = reader.call("fetch", keys=keys, nbytes=64 << 10, timeout=1.0)
    assert found["wrong"] == []
    assert found["seconds"] < 1.0 + 0.1


def test_processes_keep_their_own_environment(ranks: Ranks) -> None:
    ranks.spawn("one")
    assert "NCCL_HOSTID" not in os.environ
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
