"""A membership engine of another package: found by its entry point, run by nodes and by the simulator alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cluster import eventually
from p2pkv import Config, ConfigError
from p2pkv.directory.membership.engines import engine_class
from p2pkv.testing.simulated_cluster import SimulatedCluster
from pair import Pair

MODULE = '''
from p2pkv.directory.membership.embedded import EmbeddedMembership

class NotAnEngine:
    pass

class LoudMembership(EmbeddedMembership):
    """Counts what it is asked."""

    n_views = 0

    def view(self):
        type(self).n_views += 1
        return super().view()
'''
ENTRY_POINTS = """
[p2pkv.membership]
loud = loud_membership:LoudMembership
broken = loud_membership:Nothing
strange = loud_membership:NotAnEngine
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Have a package installed that provides engines: what pip leaves behind of one."""
    site = tmp_path / "site"
    info = site / "loud_membership-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "loud_membership.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-membership\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    import loud_membership  # type: ignore[import-not-found]

    yield loud_membership
    del sys.modules["loud_membership"]


def test_nodes_are_members_by_it(package: ModuleType, tmp_path: Path) -> None:
    pair = Pair(tmp_path, membership="loud")
    assert eventually(lambda: all(len(node.members()) == 2 for node in pair.nodes), 10.0)
    assert pair.fetch_is_right(pair.publish())
    assert package.LoudMembership.n_views > 0
    pair.close()


def test_it_runs_in_the_simulator(package: ModuleType) -> None:
    cluster = SimulatedCluster(engine_class("loud"))
    nodes = cluster.start_many(4)
    cluster.kill(nodes[0])
    cluster.run(5.0)
    assert cluster.agree()
    assert package.LoudMembership.n_views > 0


def test_unknown_engines_are_refused_with_the_nearest_name(package: ModuleType) -> None:
    with pytest.raises(ConfigError, match="did you mean 'loud'"):
        Config(membership="lout")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "has no attribute 'Nothing'"),
        ("strange", "is not a p2pkv.directory.membership.base.Membership"),
    ],
)
def test_engines_that_are_none_are_refused(package: ModuleType, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Pair(tmp_path, membership=name)
