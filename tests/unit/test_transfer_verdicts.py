"""A verdict of death costs transfers something only when it stands: a node that seems dead may object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster import eventually
from p2pkv.directory.view import Member, State, View
from p2pkv.offers.transfers import Transfers
from p2pkv.transfers import Grant, RowStatus
from transfer_pair import TransferPair

N, NBYTES = 8, 4096
FAR_S = 60.0


class Judged:
    """The consumer of a pair, what it asks the producer for, and what it believes of it."""

    def __init__(self, pair: TransferPair) -> None:
        self.pair = pair
        self.alive = View(pair.consumer.members())
        self.producer: Member = self.alive[pair.producer.node_id]
        # offered later, so that nothing but the link's end ends it
        self.grant: Grant = pair.consumer.transfers.get_async(
            pair.producer.node_id, "a request", pair.to_rows(), timeout=FAR_S
        )

    @property
    def transfers(self) -> Transfers:
        return self.pair.consumer.transfers

    def now(self, **changed: object) -> View:
        return self.alive.replacing([replace(self.producer, **changed)])  # type: ignore[arg-type]

    def is_lost(self) -> bool:
        return self.grant.done() and bool((self.grant.statuses() == RowStatus.PEER_LOST).all())

    def comes(self) -> bool:
        self.pair.producer.transfers.offer("a request", self.pair.from_rows())
        return bool((self.grant.wait(FAR_S) == RowStatus.OK).all())


@pytest.fixture
def judged() -> Iterator[Judged]:
    pair = TransferPair(N, NBYTES, deadline=FAR_S)
    try:
        yield Judged(pair)
    finally:
        pair.close()


def test_what_is_asked_of_a_node_that_only_seemed_dead_comes(judged: Judged) -> None:
    dead = judged.now(state=State.DEAD)
    judged.transfers.set_view(judged.alive, dead, grace=FAR_S)
    judged.transfers.set_view(dead, judged.now(incarnation=1))
    assert judged.comes()


def test_what_is_asked_of_a_node_that_stays_dead_is_lost(judged: Judged) -> None:
    judged.transfers.set_view(judged.alive, judged.now(state=State.DEAD), grace=0.05)
    eventually(judged.is_lost, FAR_S)


@pytest.mark.parametrize("seemed_dead", [False, True])
def test_a_node_that_left_or_was_restarted_has_no_grace(judged: Judged, seemed_dead: bool) -> None:
    before = judged.alive
    if seemed_dead:
        dead = judged.now(state=State.DEAD)
        judged.transfers.set_view(before, dead, grace=FAR_S)
        before = dead
    judged.transfers.set_view(before, judged.now(boot_epoch=judged.producer.boot_epoch + 1), grace=FAR_S)
    eventually(judged.is_lost, FAR_S / 2)
