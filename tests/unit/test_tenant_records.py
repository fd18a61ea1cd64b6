"""Records of tenants' nodes, as members carry them: those who can open them have them, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from cluster import eventually
from p2pkv.control.secret import cluster_keys
from p2pkv.directory.membership.base import ProbeReply
from p2pkv.directory.registry.among_members import RecordExchange
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.view import Member, View
from tenancy import Secrets


@pytest.fixture
def secret(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


class Carriers:
    """Members of a cluster who carry records, in one process: what one tells is taken by the other at once."""

    def __init__(self) -> None:
        self.by_address: dict[str, RecordExchange] = {}
        self.silent: set[str] = set()
        self.n_told = 0

    def tell(self, messages: Sequence[tuple[str, bytes]], timeout: float) -> list[ProbeReply | None]:
        self.n_told += len(messages)
        for address, blob in messages:
            if address in self.by_address and address not in self.silent:
                assert self.by_address[address].take(blob)
        return [None if address in self.silent else ProbeReply(1, 1, 1) for address, _ in messages]

    def add(self, node_id: str, seals: dict[str, Seal]) -> RecordExchange:
        self.by_address[f"{node_id}:1"] = exchange = RecordExchange(seals, "main", node_id, self.tell)
        return exchange


@pytest.fixture
def carriers() -> Iterator[Carriers]:
    carriers = Carriers()
    yield carriers
    for exchange in carriers.by_address.values():
        exchange.close()


def member(node_id: str, incarnation: int = 0) -> Member:
    return Member(node_id, 1, f"{node_id}:1", incarnation=incarnation)


def view_of(*node_ids: str) -> View:
    return View(member(node_id) for node_id in node_ids)


def names(exchange: RecordExchange, tenant: str = "acme") -> set[str]:
    return set(exchange.registry(tenant).listing().values)


def test_records_reach_those_with_the_tenants_secret_and_nobody_else(
    carriers: Carriers, secret: Secrets
) -> None:
    seal, other = (Seal(cluster_keys(secret(name)), "acme") for name in ("acme", "zen"))
    a, b = carriers.add("a", {"acme": seal}), carriers.add("b", {"acme": seal})
    c, d = carriers.add("c", {"acme": other}), carriers.add("d", {"zen": other})
    a.registry("acme").publish(seal.close(member("a")))
    for exchange in (a, b, c, d):
        exchange.set_view(view_of("a", "b", "c", "d"))
    eventually(lambda: names(b) == {"a"}, 10.0)
    assert names(a) == names(c) == names(d, "zen") == set()


def test_who_was_silent_is_told_once_more_and_who_comes_at_once(carriers: Carriers, secret: Secrets) -> None:
    seal = Seal(cluster_keys(secret("acme")), "acme")
    a, b = carriers.add("a", {"acme": seal}), carriers.add("b", {"acme": seal})
    carriers.silent.add("b:1")
    a.set_view(view_of("a", "b"))
    a.registry("acme").publish(seal.close(member("a")))
    eventually(lambda: carriers.n_told >= 2, 10.0)
    assert names(b) == set()
    carriers.silent.clear()
    eventually(lambda: names(b) == {"a"}, 10.0)


def test_old_and_forged_records_change_nothing(carriers: Carriers, secret: Secrets) -> None:
    seal, forger = (Seal(cluster_keys(secret(name)), "acme") for name in ("acme", "zen"))
    b = carriers.add("b", {"acme": seal})
    registry = b.registry("acme")
    registry.take(seal.close(member("a", incarnation=2)))
    known = registry.listing()
    for record in (
        seal.close(member("a", incarnation=1)),
        forger.close(member("a", incarnation=3)),
        b"",
        b"p2pkv",
    ):
        registry.take(record)
        assert registry.listing() is known
    assert registry.counters()["p2pkv_registry_failures_total"] == 3


def test_what_a_member_said_goes_with_him(carriers: Carriers, secret: Secrets) -> None:
    seal = Seal(cluster_keys(secret("acme")), "acme")
    b = carriers.add("b", {"acme": seal})
    b.set_view(view_of("a", "b"))
    b.registry("acme").take(seal.close(member("a")))
    assert names(b) == {"a"}
    b.set_view(view_of("b"))
    assert names(b) == set()


def test_no_other_message_is_taken_for_a_record(carriers: Carriers, secret: Secrets) -> None:
    b = carriers.add("b", {"acme": Seal(cluster_keys(secret("acme")), "acme")})
    dice = Random(1)
    for blob in (b"", b"\x80", b"\xc0", dice.randbytes(1 << 14), *(dice.randbytes(40) for _ in range(2000))):
        assert not b.take(blob)
