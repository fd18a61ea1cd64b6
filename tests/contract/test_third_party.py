"""A transport in a package of its own, installed and named, and nothing else done: it takes part like one of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import Cluster, eventually
from p2pkv.testing.processes import RefusedError
from patience import PATIENCE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOY = Path(__file__).parents[1] / "support" / "toy_transport"
KEYS = [f"page-{i}" for i in range(32)]
NBYTES = 65536


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the toy for child processes alone, as pip would but without its build backend; return the folder."""
    folder = tmp_path / "site-packages"
    project = tomllib.loads((TOY / "pyproject.toml").read_text())
    (package,) = project["tool"]["setuptools"]["packages"]
    shutil.copytree(TOY / package, folder / package)
    project = project["project"]
    about = folder / f"{package}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (about / "entry_points.txt").write_text(
        "\n".join(
            line
            for group, points in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
        )
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300 * PATIENCE,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done


def test_it_passes_the_contract_suite_in_its_own_project(installed: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(TOY / "pyproject.toml", project)
    shutil.copytree(TOY / "tests", project / "tests")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert done.returncode == 0
    summary = done.stdout.splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary, "across processes as well"


@pytest.mark.usefixtures("installed")
def test_its_nodes_fetch_each_others_pages(cluster: Cluster) -> None:
    settings = {"transports": ["toy"], "transport_options": {"toy": {"piece": 16384}}}
    nodes = [cluster.start(name, **settings) for name in ("a", "b")]
    cluster.meet(*nodes)
    for node in nodes:
        keys = [f"{node.node_id}-{key}" for key in KEYS]
        assert node.call("publish", keys=keys, nbytes=NBYTES) == [1] * len(KEYS)
    for reader, owner in (nodes, nodes[::-1]):
        keys = [f"{owner.node_id}-{key}" for key in KEYS]
        eventually(lambda: all(reader.call("exists", keys=keys)["hits"]), 10.0)  # noqa: B023
        answer = reader.call("fetch", keys=keys, nbytes=NBYTES)
        assert answer["hits"] == [1] * len(KEYS)
        assert answer["wrong"] == []
        fetched = reader.call("counters")['p2pkv_fetched_bytes_total{source="toy"}']
        assert fetched == len(KEYS) * NBYTES


@pytest.mark.usefixtures("installed")
def test_its_options_are_checked_before_a_node_starts(cluster: Cluster) -> None:
    with pytest.raises(
        RefusedError, match="transport_options of toy: unknown option 'peice'; did you mean 'piece'"
    ):
        cluster.start("a", transports=["toy"], transport_options={"toy": {"peice": 4096}})


@pytest.mark.usefixtures("installed")
def test_memory_of_transfers_needs_a_native_transport_beside_it(cluster: Cluster) -> None:
    with pytest.raises(RefusedError, match="none of the native core is in use"):
        cluster.start("a", transports=["toy"], readable=True)
    nodes = [cluster.start(name, transports=["toy", "tcp"], readable=True) for name in ("b", "c")]
    cluster.meet(*nodes)
    nodes[0].call("offer", request="r", n=4, nbytes=4096, seed=7)
    nodes[1].call("grant", request="r", n=4, nbytes=4096, timeout=10.0, source="b")
    answer = nodes[1].call("wait", request="r", timeout=10.0, seed=7, nbytes=4096)
    assert answer["statuses"] == ["OK"]
    assert answer["wrong"] == 0


@pytest.mark.usefixtures("installed")
def test_the_doctor_tries_it_out_and_shows_its_options(tmp_path: Path) -> None:
    options = '{"toy": {"piece": 8192}}'
    main = "from p2pkv.cli import main; main()"
    done = run("-c", main, "doctor", "--jsonl", "--set", f"transport_options={options}", cwd=tmp_path)
    says = {finding["what"]: finding["says"] for finding in map(json.loads, done.stdout.splitlines())}
    assert "read from itself and right" in says["transport toy"]
    assert says["options of toy"] == "port 0, piece 8192"
