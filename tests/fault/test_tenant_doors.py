"""Who lacks a tenant's secret, and tries: at its doors, with tokens and regions that are not his, and at random."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import pages
from cluster import eventually
from p2pkv import Config, Node, Outcome
from p2pkv.testing.ports import free_port
from p2pkv.transports.base import Status
from tenancy import Secrets, settings

N, NBYTES = 8, 4096


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


# doors


class Doors:
    """A node with a tenant, and a member of the cluster without the tenant's secret."""

    def __init__(self, secret: Secrets, transport: str) -> None:
        join = [f"127.0.0.1:{free_port()}"]
        common = {"join": join, "transports": [transport]}
        self.owner = Node.start(Config(node_id="owner", **settings(secret, "acme", **common)))
        self.member = Node.start(Config(node_id="member", **settings(secret, **common)))
        self.tenant = self.owner.tenant("acme")
        self.keys = [f"page-{i}" for i in range(N)]
        self.source = np.zeros((N, NBYTES), np.uint8)
        pages.fill(self.source, self.keys)
        self.tenant.register_memory(self.source)
        assert self.tenant.publish(self.keys, self.source).all()
        self.own_source = np.full((N, NBYTES), 7, np.uint8)
        self.owner.register_memory(self.own_source)
        assert self.owner.publish(self.keys, self.own_source).all()
        eventually(lambda: len(self.member.members()) == 2, 10.0)

    def close(self) -> None:
        self.member.close()
        self.owner.close()


@pytest.fixture(params=["tcp", "shm"])
def doors(request: pytest.FixtureRequest, secret: Secrets) -> Iterator[Doors]:
    doors = Doors(secret, request.param)
    yield doors
    doors.close()


def connected(asker: Node, owner: Node, deadline_s: float = 3.0) -> tuple[Any, bytes] | None:
    """Have ``asker`` connect to the node ``owner`` over their transport; return the endpoint and the pool's region."""
    transport = asker._parts.transports[0]  # type: ignore[union-attr]
    [record] = [member for member in owner.members() if member.node_id == owner.node_id]
    endpoint = transport.open()
    deadline = time.monotonic() + deadline_s
    answer = asker._parts.control.handshakes.connect(record, transport.name, endpoint.describe(), deadline)  # type: ignore[union-attr]
    if answer is None:
        endpoint.close()
        return None
    endpoint.bind(answer[0])
    return endpoint, answer[1]


def read(asker: Node, endpoint: Any, region: bytes, owner: Node, keys: Sequence[str]) -> np.ndarray[Any, Any]:
    """Read the bytes of ``owner``'s pages through ``endpoint`` with no word asked for; zeros where nothing came."""
    pool = owner._parts.caching.pool  # type: ignore[union-attr]
    found, locations = pool.lookup(owner._cache.hash(keys)[1])
    assert found.all()
    into = np.zeros((len(keys), NBYTES), np.uint8)
    memory = asker._parts.transports[0].register_memory(into, into.ctypes.data, into.nbytes, readable=False)  # type: ignore[union-attr]
    rows = [[i * NBYTES, int(location["offset"]), NBYTES] for i, location in enumerate(locations)]
    transfer = endpoint.read(memory, endpoint.attach(region), np.array(rows, np.int64), words=None)
    statuses = transfer.wait(3.0)
    into[np.asarray(statuses) != Status.OK] = 0
    memory.close()
    return into


def test_the_clusters_key_opens_no_door_of_a_tenant(doors: Doors) -> None:
    assert connected(doors.member, doors.owner) is not None, "of its own cluster it is let in"
    before = doors.tenant.counters()["p2pkv_refused_strangers_total"]
    assert connected(doors.member, doors.tenant) is None
    assert doors.tenant.counters()["p2pkv_refused_strangers_total"] > before


def test_a_tenants_region_is_not_read_through_a_connection_of_the_cluster(
    doors: Doors, secret: Secrets
) -> None:
    fellow = Node.start(
        Config(
            **{
                **settings(secret, transports=[doors.owner.config.transport_names[0]]),
                "secret_file": secret("acme"),
                "cluster": doors.tenant.config.cluster,
                "node_id": "fellow",
            }
        )
    )
    try:
        inside = connected(fellow, doors.tenant)
        assert inside is not None
        endpoint, region = inside
        with endpoint:
            assert (read(fellow, endpoint, region, doors.tenant, doors.keys) == doors.source).all()
        outside = connected(doors.member, doors.owner)
        assert outside is not None
        endpoint, own_region = outside
        with endpoint:
            assert (read(doors.member, endpoint, own_region, doors.owner, doors.keys) == 7).all()
        again = connected(doors.member, doors.owner)
        assert again is not None
        with again[0] as endpoint:
            stolen = read(doors.member, endpoint, region, doors.tenant, doors.keys)
            assert not (stolen == doors.source).all(axis=1).any(), "the tenant's bytes by the cluster's token"
    finally:
        fellow.close()


def test_a_token_of_the_cluster_is_none_at_a_tenants_door(doors: Doors) -> None:
    """Everything but the token leads to the tenant's door; the token is good at the node's own."""
    transport = doors.member._parts.transports[0]
    tenants_own = doors.tenant._parts.transports[0]
    with tenants_own.open() as donor:
        door = donor.describe()
    where, token = (slice(0, 32), slice(32, 64)) if transport.name == "tcp" else (slice(0, 48), slice(48, 80))
    [record] = [member for member in doors.member.members() if member.node_id == "owner"]
    for half_of, is_let_in in ((None, True), (door, False)):
        endpoint = transport.open()
        deadline = time.monotonic() + 3.0
        handshakes = doors.member._parts.control.handshakes  # type: ignore[union-attr]
        answer = handshakes.connect(record, transport.name, endpoint.describe(), deadline)
        assert answer is not None
        half = answer[0]
        assert len(half[token]) == 32
        greeted = half if half_of is None else half_of[where] + half[token] + half[token.stop :]
        assert hung_up(transport.name, greeted, half[token]) is not is_let_in
        endpoint.close()


def hung_up(name: str, half: bytes, token: bytes) -> bool:
    """Say hello with a token where ``half`` leads; whether the other end hangs up instead of waiting for a request."""
    magic = b"P2TH" if name == "tcp" else b"P2SH"
    if name == "tcp":
        (port,) = struct.unpack_from("<H", half, 6)
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
    else:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(b"\0" + half[8:48].rstrip(b"\0"))
    with stranger:
        stranger.settimeout(1.0)
        stranger.sendall(struct.pack("<4sHH", magic, 1, 0) + token)
        try:
            return stranger.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True


# who may see what, at random


SCOPES = ("", "a", "ab", "b")
"""The cluster's own namespace, and tenants, of which one has a name that another one's begins with."""


class Seen:
    """Nodes with random tenants, and an oracle of who may see what."""

    def __init__(self, secret: Secrets, dice: Random) -> None:
        join = [f"127.0.0.1:{free_port()}"]
        self.dice = dice
        self.published: set[tuple[str, str]] = set()
        self.nodes: list[dict[str, Node]] = []
        self.rows: dict[Node, np.ndarray[Any, Any]] = {}
        for number in range(3):
            # the first one has all, so that no tenant is told from another one by its absence
            mine = [name for name in SCOPES[1:] if number == 0 or dice.random() < 0.6]
            others = [name for name in SCOPES[1:] if name not in mine]
            # a node may be called by a tenant's name whose secret it lacks
            namespace = dice.choice([*others, "default"])
            node = Node.start(
                Config(
                    node_id=f"n{number}",
                    namespace=namespace,
                    **settings(secret, *mine, join=join, transports=[dice.choice(["tcp", "shm"])]),
                )
            )
            self.nodes.append({f"={namespace}": node, **{name: node.tenant(name) for name in mine}})
        for scopes in self.nodes:
            for node in scopes.values():
                self.rows[node] = np.zeros((4, NBYTES), np.uint8)
                node.register_memory(self.rows[node])

    def step(self) -> int:
        """Have somebody publish or look; return how many pages were found."""
        scopes = self.dice.choice(self.nodes)
        scope = self.dice.choice(sorted(scopes))
        node = scopes[scope]
        rows, keys = self.rows[node], [f"key-{i}" for i in self.dice.sample(range(12), 4)]
        bytes_of = [f"{scope} {key}" for key in keys]
        if self.dice.random() < 0.4:
            pages.fill(rows, bytes_of)
            outcomes = node.publish(keys, rows)
            self.published.update((scope, key) for key, hit in zip(keys, outcomes, strict=True) if hit)
            return 0
        rows[:] = 0
        outcomes = node.fetch(keys, rows)
        assert pages.wrong(rows, bytes_of, outcomes) == [], f"{node} reads another's bytes in {scope!r}"
        found = [node.exists(keys), outcomes]
        for hits in found:
            for key, hit in zip(keys, hits, strict=True):
                assert not hit or (scope, key) in self.published, f"{node} finds {key} of others in {scope!r}"
        return int((outcomes == Outcome.HIT).sum())

    def close(self) -> None:
        for scopes in self.nodes:
            next(iter(scopes.values())).close()


@pytest.mark.parametrize("round_", range(3))
def test_nobody_ever_sees_a_page_of_others(round_: int, secret: Secrets) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    seen = Seen(secret, Random(seed))
    try:
        n_found = sum(seen.step() for _ in range(150))
        assert n_found > 0, "nothing was found at all, so nothing was shown"
    finally:
        seen.close()
