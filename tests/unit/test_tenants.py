"""Tenants of a node: what their settings may be, and what the node around them does for them."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import eventually
from p2pkv import Config, ConfigError, Node, UsageError
from p2pkv.cli import app
from p2pkv.config.tenants import tenant_config
from p2pkv.parts.node import NodeParts
from p2pkv.testing.ports import free_port
from tenancy import Secrets, settings


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.close()


# settings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "tenants must be JSON such as"),
        ([], "tenants must have an object of settings for each"),
        ({"acme": "x"}, "tenants must have an object of settings for each"),
        ({"acme eu": {"secret_file": "x"}}, "first word of its namespaces"),
        ({"": {"secret_file": "x"}}, "first word of its namespaces"),
        ({"acme": {}}, "acme: secret_file is missing"),
        ({"acme": {"secret_file": "x", "pool_sise": 1}}, "did you mean 'pool_size'?"),
        ({"acme": {"secret_file": "x", "namespace": "y"}}, "acme: unknown setting 'namespace'"),
        ({"acme": {"secret_file": "x", "pool_size": 0}}, "acme: pool_size is 0"),
        ({"acme": {"secret_file": "x", "pool_size": "4KiB"}}, "acme: pool_size is 4096 bytes"),
        ({"acme": {"secret_file": "x", "requests": -1}}, "acme: requests must be 0"),
        ({"acme": {"secret_file": "x", "disk_path": "/d"}}, "acme: disk_path is '/d', but disk_size is 0"),
        ({"acme": {"secret_file": "x", "cluster": "p2pkv"}}, "cluster is 'p2pkv', which this node has"),
        ({"default": {"secret_file": "x"}}, "'default' is one of tenants"),
        ({str(i): {"secret_file": "x"} for i in range(17)}, "tenants has 17, and a node takes 16"),
    ],
)
def test_what_is_wrong_of_tenants_is_said_by_name(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(node_id="n", tenants=wrong)
    assert said in str(caught.value)


def test_two_can_not_have_one_folder() -> None:
    disk = {"secret_file": "x", "disk_path": "/d", "disk_size": "1GiB"}
    with pytest.raises(
        ConfigError, match="tenants: zen: disk_path is '/d', which acme has; give each its own"
    ):
        Config(node_id="n", tenants={"acme": disk, "zen": disk})


@pytest.mark.parametrize(
    ("one", "other"), [("/d/x", "/d/./x"), ("/d/x", "/d/x/y"), ("/d/x/y", "/d/x"), ("/d/x", "/d/z/../x/y")]
)
def test_two_can_not_have_folders_within_each_other(one: str, other: str) -> None:
    acme = {"secret_file": "x", "disk_path": other, "disk_size": "1GiB"}
    with pytest.raises(
        ConfigError, match=f"tenants: acme: disk_path is '{other}', and that of this node is '{one}'"
    ):
        Config(node_id="n", disk_path=one, disk_size="1GiB", tenants={"acme": acme})
    zen = acme | {"disk_path": one}
    with pytest.raises(ConfigError, match="neither may be the other or lie within it"):
        Config(node_id="n", tenants={"acme": acme, "zen": zen})
    Config(node_id="n", tenants={"acme": acme, "zen": zen | {"disk_path": "/d/x-2"}})


def test_what_is_there_twice_in_json_is_refused(tmp_path: Path) -> None:
    twice = '{"acme": {"secret_file": "x"}, "acme": {"secret_file": "y"}}'
    with pytest.raises(
        ConfigError, match=r"tenants must be JSON such as .*: 'acme' is there twice; leave one out"
    ):
        Config(node_id="n", tenants=twice)
    (tmp_path / "node.json").write_text(f'{{"node_id": "n", "tenants": {twice}}}')
    with pytest.raises(ConfigError, match="'acme' is there twice"):
        Config.load(tmp_path / "node.json", environ={})


def test_a_disk_needs_a_node_id_for_tenants_too() -> None:
    with pytest.raises(ConfigError, match="tenants: acme: disk_size is set, but node_id is not"):
        Config(tenants={"acme": {"secret_file": "x", "disk_size": "1GiB"}})


def test_a_transport_by_which_one_cluster_could_reach_anothers_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="tenants: transports names ucx"):
        Config(transports=["tcp", "ucx"], tenants={"acme": {"secret_file": "x"}})


def test_an_engine_that_attaches_has_no_tenants() -> None:
    with pytest.raises(ConfigError, match="attaches to the attach_listen of that tenant"):
        Config(attach="unix:/run/p2pkv/host", tenants={"acme": {"secret_file": "x"}})


def test_a_tenant_has_nothing_of_what_the_node_has_for_itself() -> None:
    config = Config(
        node_id="n",
        metrics_port=0,
        kv_events="tcp://127.0.0.1:0",
        join=["127.0.0.1:7400"],
        disk_size="1GiB",
        verify="checksum",
        tenants='{"acme": {"secret_file": "x"}}',
    )
    own = tenant_config(config, "acme")
    assert (own.metrics_port, own.kv_events, own.join_addresses, own.disk_nbytes) == (None, "", (), 0)
    assert (own.verify, own.namespace, own.node_id) == ("checksum", "acme", "n")
    assert own.cluster not in (
        config.cluster,
        tenant_config(dataclasses.replace(config, cluster="x"), "acme").cluster,
    )


@pytest.mark.parametrize("whose", ["cluster", "acme"])
def test_a_secret_that_somebody_else_has_is_refused(whose: str, secret: Secrets) -> None:
    given = settings(secret, "acme")
    given["tenants"]["zen"] = {"secret_file": secret(whose)}
    said = "the cluster" if whose == "cluster" else "tenant acme"
    with pytest.raises(ConfigError, match=f"tenants: zen: its secret in .* is also that of {said}"):
        Node.start(Config(**given))


def test_a_secret_that_others_can_read_is_refused(secret: Secrets) -> None:
    given = settings(secret, "acme")
    Path(secret("acme")).chmod(0o644)
    with pytest.raises(ConfigError, match=r"tenants: acme: secret_file .* has mode 0644.*chmod 600"):
        Node.start(Config(**given))


def test_a_secret_that_is_not_there_is_refused(secret: Secrets) -> None:
    given = settings(secret)
    given["tenants"]["acme"] = {"secret_file": secret("acme") + "-not"}
    with pytest.raises(ConfigError, match=r"tenants: acme: cannot read secret_file .*No such file"):
        Node.start(Config(**given))


def test_pools_that_do_not_fit_together_are_refused(secret: Secrets) -> None:
    given = settings(secret, "acme")
    given["tenants"]["acme"]["pool_size"] = 1 << 50
    with pytest.raises(ConfigError, match="with the pools of its tenants: pool_size"):
        Node.start(Config(**given))


def test_what_a_tenant_lacks_ends_the_start_and_leaves_nothing(secret: Secrets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = settings(secret, "acme", "zen")
        given["tenants"]["zen"]["metrics_port"] = taken.getsockname()[1]
        with pytest.raises(Exception, match="tenants: zen: "):
            Node.start(Config(**given))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("p2pkv")]


# a node with tenants


def test_a_tenant_that_is_not_there_is_said_to_be_so(secret: Secrets, nodes: list[Node]) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme"))))
    with pytest.raises(
        UsageError, match="has no tenant 'zen', it has acme; give it the tenant's secret_file"
    ):
        nodes[0].tenant("zen")


def test_figures_of_tenants_stand_among_those_of_the_node(secret: Secrets, nodes: list[Node]) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme", "zen"))))
    counters = nodes[0].counters()
    for name in ("acme", "zen"):
        assert counters[f'p2pkv_tenant_members{{tenant="{name}"}}'] == 1
        assert counters[f'p2pkv_tenant_pool_capacity_bytes{{tenant="{name}"}}'] == 1 << 20


def n_bumped(node: Node) -> int:
    """Return of how many namespaces a node knows a bump."""
    parts = node._parts
    assert isinstance(parts, NodeParts)
    return len(parts.control.epochs.all())


def test_a_bump_goes_to_the_tenant_of_the_namespace(secret: Secrets, nodes: list[Node]) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme", "zen"))))
    nodes[0].bump("acme")
    assert nodes[0].tenant("acme").epoch > 0
    assert nodes[0].epoch == nodes[0].tenant("zen").epoch == 0
    nodes[0].bump("zen vllm model=m")
    assert n_bumped(nodes[0]) == 0, "the cluster has none of a tenant's"
    assert n_bumped(nodes[0].tenant("zen")) == n_bumped(nodes[0].tenant("acme")) == 1
    assert nodes[0].tenant("zen").epoch == 0, "it is of a part of that namespace, and of the tenant's own not"


def test_the_commands_with_the_clusters_secret_do_not_bump_a_tenant(
    secret: Secrets, nodes: list[Node]
) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme"))))
    command = ["namespace", "bump", "--join", nodes[0].address, "--set", f"secret_file={secret('cluster')}"]
    refused = CliRunner().invoke(app, [*command, "acme vllm"])
    assert "acme is a tenant of" in str(refused.exception)
    assert CliRunner().invoke(app, [*command, "default"]).exit_code == 0


def test_tenants_of_a_node_that_listens_everywhere_are_found_where_it_is(
    secret: Secrets, nodes: list[Node]
) -> None:
    port = free_port()
    given = settings(secret, "acme") | {"listen": f"0.0.0.0:{port}", "join": [f"127.0.0.1:{port}"]}
    nodes.append(Node.start(Config(**given)))
    host = nodes[0].address.rpartition(":")[0]
    assert nodes[0].tenant("acme").address.startswith(f"{host}:")


def test_a_tenant_that_was_closed_by_itself_is_not_waited_for(secret: Secrets, nodes: list[Node]) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme", "zen"))))
    nodes[0].tenant("acme").close()
    nodes[0].begin_drain(0.0)
    eventually(lambda: nodes[0].drained is not None, 60.0)


def test_who_tells_a_node_to_drain_says_for_how_long_to_its_tenants_too(
    secret: Secrets, nodes: list[Node]
) -> None:
    nodes.append(Node.start(Config(**settings(secret, "acme"), drain=0)))
    command = ["drain", nodes[0].node_id, "--seconds", "7", "--join", nodes[0].address]
    CliRunner().invoke(app, [*command, "--set", f"secret_file={secret('cluster')}"])
    assert nodes[0].tenant("acme").draining_within == nodes[0].draining_within == 7.0


def test_status_says_who_serves_which_tenant(secret: Secrets, nodes: list[Node]) -> None:
    join = [f"127.0.0.1:{free_port()}"]
    for node_id, own in (("a", ("acme", "zen")), ("b", ("acme",))):
        nodes.append(Node.start(Config(node_id=node_id, **settings(secret, *own, join=join))))
    eventually(lambda: len(nodes[1].tenant("acme").members()) == 2, 10.0)
    eventually(lambda: len(nodes[1].members()) == 2, 10.0)
    arguments = ["status", "--join", join[0], "--set", f"secret_file={secret('cluster')}"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0
    assert "tenant acme at a, b: 2 nodes of its own cluster, 0 pages in 0.0 of 2.0 MiB" in told.stdout
    assert "tenant zen at a: 1 nodes" in told.stdout
    [acme, zen] = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["tenants"]
    assert (acme["name"], acme["nodes"], zen["n_members"]) == ("acme", ["a", "b"], 1)


def test_a_node_that_is_told_to_drain_by_others_has_its_tenants_drain(
    secret: Secrets, nodes: list[Node]
) -> None:
    nodes.append(Node.start(Config(drain=5.0, **settings(secret, "acme"))))
    told = CliRunner().invoke(
        app,
        ["drain", nodes[0].node_id, "--join", nodes[0].address, "--set", f"secret_file={secret('cluster')}"],
    )
    assert told.exit_code == 0, told.output
    eventually(lambda: nodes[0].drained is not None, 10.0)
    assert nodes[0].tenant("acme").drained is not None


def test_the_log_says_of_which_cluster_a_node_is(
    secret: Secrets, nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """Tenants' nodes have the id of the node around them: a death would be said of each, and which it is nowhere."""
    with caplog.at_level(logging.INFO):
        nodes.append(
            Node.start(
                Config(
                    node_id="n", secret_file=secret("ours"), tenants={"acme": {"secret_file": secret("acme")}}
                )
            )
        )
    cluster = nodes[0].tenant("acme").config.cluster
    assert f"tenant acme is served, in its cluster {cluster!r}" in caplog.text
    alive = [said for said in caplog.messages if said.endswith(f"is alive in cluster {cluster!r}")]
    assert len(alive) == 1
    assert len([said for said in caplog.messages if said.endswith(" is alive")]) == 1
