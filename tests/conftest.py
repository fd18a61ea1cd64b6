"""What holds for all tests, before any of them imports numpy, and fixtures for tests that run whole nodes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

# BLAS threads wait by spinning: on busy cores the demo's model is ten times slower with two than with one
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# How long an example takes, or its choice, is the machine's doing: no test here is of that.
settings.register_profile("p2pkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("p2pkv")

collect_ignore = ["support/toy_transport"]  # a project of its own, whose tests need it installed

pytest.register_assert_rewrite(
    "p2pkv.testing.transport_contract", "p2pkv.testing.transport_faults", "p2pkv.testing.transport_fixtures"
)

from cluster import Cluster  # noqa: E402
from hangs import Hangs  # noqa: E402
from sharing import Sharing  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Hangs())


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays until the end: thousands of tests, which each collection would visit."""
    gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of ``-n auto``: more than processors, since tests wait for half of their time."""
    return min(16, len(os.sched_getaffinity(0)) + 2)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing | None:
    """Return what deals out tests where they are dealt out by groups."""
    return Sharing(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Node processes that are gone when the test ends, however it ends."""
    with Cluster() as cluster:
        yield cluster
