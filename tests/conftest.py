"""Fixtures for tests that run whole nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster

pytest.register_assert_rewrite("p2pkv.testing.transport_contract")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Node processes that are gone when the test ends, however it ends."""
    with Cluster() as cluster:
        yield cluster
