"""The Helm chart: rendered by Helm's own code it is what kustomize makes, and keeps to the schemas of Kubernetes."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pkv.config import Config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/p2pkv"
NODE = ROOT / "deploy/kubernetes/node"
OPERATIONS = ROOT / "docs/operations.md"

if importlib.util.find_spec("helm_python") is None:
    pytest.skip("helm-python-sdk, Helm as a library, is not installed", allow_module_level=True)

from helm_python.chart import Chart, lint  # noqa: E402
from helm_python.errors import HelmRenderError, HelmValuesError  # noqa: E402

Document = dict[str, Any]


def rendered(**values: object) -> dict[str, Document]:
    made = Chart.load(CHART).render(values, name="p2pkv", namespace="default")
    return by_kind(document for text in made.values() for document in yaml.safe_load_all(text) if document)


def by_kind(documents: Iterable[Document]) -> dict[str, Document]:
    """Return them by kind; the keeper's, which is a second DaemonSet, as Keeper."""
    return {"Keeper" if one["metadata"]["name"] == "p2pkv-keeper" else one["kind"]: one for one in documents}


def by_kustomize(folder: Path, components: list[str]) -> dict[str, Document]:
    shutil.copytree(NODE, folder / "node")
    (folder / "overlay").mkdir()
    overlay = {"resources": ["../node"], "components": [f"../node/{name}" for name in components]}
    (folder / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = subprocess.run(
        ["kubectl", "kustomize", str(folder / "overlay")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return by_kind(yaml.safe_load_all(made))


def settled(documents: dict[str, Document]) -> dict[str, Document]:
    """Without what the two tools do each in its own way.

    The name of a ConfigMap changes with it, or its sum; and a component's image has its tag where an overlay says so.
    """
    name = documents["ConfigMap"]["metadata"]["name"]
    text = (
        json.dumps(documents)
        .replace(name, "p2pkv-node")
        .replace('"image": "p2pkv"', '"image": "p2pkv:latest"')
    )
    documents = json.loads(text)
    documents["ConfigMap"]["data"] = json.loads(documents["ConfigMap"]["data"]["node.json"])
    documents["DaemonSet"]["spec"]["template"]["metadata"]["annotations"].pop("checksum/config", None)
    return documents


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize(
    "components",
    [
        [],
        ["disk"],
        ["rdma"],
        ["attach"],
        ["disk", "attach"],
        ["disk", "rdma"],
        ["attach", "keeper"],
        ["disk", "attach", "keeper"],
    ],
    ids=str,
)
def test_the_chart_makes_what_kustomize_makes(components: list[str], tmp_path: Path) -> None:
    values = {name: {"enabled": True} for name in components}
    assert settled(rendered(**values)) == settled(by_kustomize(tmp_path, components))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"disk": {"enabled": True, "size": "1TiB"}, "rdma": {"enabled": True}, "attach": {"enabled": True}},
        {"keeper": {"enabled": True}, "attach": {"enabled": True}, "tolerations": [{"operator": "Exists"}]},
        {
            "networkPolicy": {"enabled": False},
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"operator": "Exists"}],
        },
        {
            "ports": {"control": 8000, "metrics": 8001},
            "settings": {"pool_size": "1GiB", "data_ports": "8002-8010"},
        },
    ],
)
def test_what_it_makes_keeps_to_the_schemas_and_is_what_a_node_takes(values: dict[str, object]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = rendered(**values)
    for document in documents.values():
        kubernetes_validate.validate(document, "1.30", strict=True)
    given = json.loads(documents["ConfigMap"]["data"]["node.json"])
    config = Config.load(given, environ={})
    [container] = documents["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["metrics"] == config.metrics_port
    assert config.join_addresses == (f"p2pkv-node:{ports['control']}",)
    assert ("NetworkPolicy" in documents) == (values.get("networkPolicy") is None)


@pytest.mark.parametrize(
    ("values", "copied", "accepted"),
    [
        ({"acceptedSecretKeys": ["next"]}, {"secret": "secret", "accepted-next": "next"}, ["accepted-next"]),
        (
            {"secretKey": "next", "acceptedSecretKeys": ["secret"]},
            {"secret": "next", "accepted-secret": "secret"},
            ["accepted-secret"],
        ),
        ({"secretKey": "next"}, {"secret": "next"}, []),
    ],
)
def test_each_round_of_another_secret_is_values(
    values: dict[str, object], copied: dict[str, str], accepted: list[str]
) -> None:
    documents = rendered(**values)
    [secret] = documents["DaemonSet"]["spec"]["template"]["spec"]["initContainers"]
    commands = [shlex.split(command) for command in secret["command"][-1].split(" && ")]
    assert commands == [
        ["install", "-m", "0600", f"/given/{key}", f"/private/{name}"] for name, key in copied.items()
    ]
    config = Config.load(json.loads(documents["ConfigMap"]["data"]["node.json"]), environ={})
    assert config.secret_file == "/private/secret"
    assert list(config.accepted_secret_files) == [f"/private/{name}" for name in accepted]


@pytest.mark.parametrize(
    "values",
    [
        {"memory": "9GB"},
        {"diks": {}},
        {"acceptedSecretKeys": ["next; reboot"]},
        {"settings": {"pool_size": "1GiB", "data_ports": "7"}},
    ],
)
def test_values_that_are_none_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(HelmValuesError):
        Chart.load(CHART).validate_schema(values)


def test_a_keeper_without_engines_that_attach_is_refused_in_words() -> None:
    with pytest.raises(HelmRenderError, match=r"takes attach\.enabled"):
        rendered(keeper={"enabled": True})


def test_the_values_that_the_documents_set_are_taken() -> None:
    command = re.search(r"^helm install p2pkv deploy/helm/p2pkv (.*)$", OPERATIONS.read_text(), re.MULTILINE)
    assert command is not None
    values: Document = {}
    for assignment in re.findall(r"--set (\S+)", command[1]):
        path, _, value = assignment.partition("=")
        *above, last = path.split(".")
        place = values
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value == "true" if value in ("true", "false") else value
    documents = rendered(**values)
    spec = documents["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["memory"] == "34Gi"
    assert "disk" in {volume["name"] for volume in spec["volumes"]}
    assert json.loads(documents["ConfigMap"]["data"]["node.json"])["pool_size"] == "32GiB"


def test_helm_finds_nothing_to_mend() -> None:
    found = lint(CHART, strict=True)
    assert found["errors"] == []
    assert [m for m in found["messages"] if m["severity"] > 1] == []  # 1 would like an icon
