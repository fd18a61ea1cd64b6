"""Records in a store: what is sealed, what is followed, what is kept. The store is simulated, and its faults."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from random import Random

import pytest

from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.registry.follower import LONGEST_PAUSE_S, QUIET_S, Follower
from p2pkv.directory.registry.keeper import Keeper
from p2pkv.directory.registry.seal import MAGIC, Seal
from p2pkv.directory.registry.store import Change, GapError
from p2pkv.directory.view import Member
from p2pkv.errors import RegistryError, VersionError, ViewError
from p2pkv.testing.simulated_network import SimulatedClock
from p2pkv.testing.simulated_registry import TTL, SimulatedStore, StoreServer

MEMBER = Member("n1", 7, "h1:7000", transports={"tcp": "net"})


def seal(secret: bytes = b"secret", cluster: str = "c") -> Seal:
    return Seal(ClusterKeys(b"", secret), cluster)


class Side:
    """A follower and a keeper of one node, on one clock."""

    def __init__(self, server: StoreServer, node_id: str = "n1") -> None:
        self.server = server
        self.clock = SimulatedClock(0.0)
        self.n_changes = 0
        stores = [SimulatedStore(server, node_id, self.clock) for _ in range(2)]
        self.follower = Follower(stores[0], "the store", self.clock.monotonic, Random(1), self.changed)
        self.keeper = Keeper(stores[1], "the store", TTL, self.clock.monotonic, Random(1))
        self.keeper.open(node_id, lambda ours, theirs: ours > theirs)

    def changed(self) -> None:
        self.n_changes += 1

    def known(self) -> dict[str, bytes]:
        for _ in range(3):
            self.follower.step(0.0)
        return dict(self.follower.listing.values)


@pytest.fixture
def side() -> Side:
    return Side(StoreServer())


def test_a_sealed_record_is_opened_by_those_with_the_secret() -> None:
    assert seal().open(seal().close(MEMBER)) == MEMBER


@pytest.mark.parametrize(
    ("sealed", "error", "why"),
    [
        (b"", ViewError, "no record of p2pkv"),
        (b"garbage" * 100, ViewError, "no record of p2pkv"),
        (MAGIC + b"\x02" + bytes(64), VersionError, "of version 2, and this node reads 1"),
        (MAGIC + b"\x01" + bytes(64), ViewError, "this cluster's secret"),
        (seal(b"another").close(MEMBER), ViewError, "the same secret_file"),
        (seal(cluster="d").close(MEMBER), ViewError, "of cluster 'd', this node of 'c'"),
        (seal().close(MEMBER) + b"\0" * 9000, ViewError, "no record of p2pkv"),
    ],
)
def test_what_is_no_record_of_this_cluster_is_refused_with_a_reason(
    sealed: bytes, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        seal().open(sealed)


def test_the_record_of_version_1_is_read_for_ever() -> None:
    golden = (Path(__file__).parents[1] / "golden/record-v1.bin").read_bytes()
    assert seal(b"0123456789").open(golden) == MEMBER
    assert seal(b"0123456789").close(MEMBER) == golden


def test_no_changed_byte_of_a_record_goes_unnoticed() -> None:
    sealed = seal().close(MEMBER)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises((ViewError, VersionError)):
            seal().open(bytes(changed))


def test_changes_are_followed(side: Side) -> None:
    side.server.write("a", b"1", 0.0)
    assert side.known() == {"a": b"1"}
    side.server.write("b", b"2", 0.0)
    side.server.write("a", None, 0.0)
    assert side.known() == {"b": b"2"}
    assert side.follower.n_lists == 1
    assert side.n_changes == 2


@pytest.mark.parametrize("harm", ["compact", "break_watches"])
def test_whatever_was_missed_is_in_the_next_list(side: Side, harm: str) -> None:
    side.server.write("a", b"1", 0.0)
    side.known()
    side.server.write("a", None, 0.0)
    side.server.write("b", b"2", 0.0)
    getattr(side.server, harm)()
    assert side.known() == {"b": b"2"}
    assert side.follower.n_lists == 2


def test_what_comes_twice_and_late_changes_nothing(side: Side) -> None:
    side.known()
    told = [Change("a", b"2", 3), Change("a", b"1", 2), Change("b", None, 5), Change("b", b"0", 4)]
    side.server.changes_after = lambda since, now: told  # type: ignore[method-assign]
    assert side.known() == {"a": b"2"}


def test_a_silence_ends_in_a_list(side: Side) -> None:
    side.known()
    side.clock.now += QUIET_S + 1
    side.known()
    assert side.follower.n_lists == 2


@pytest.mark.parametrize("end", [GapError("compacted"), RegistryError("the stream has ended")])
def test_streams_that_end_at_once_are_not_asked_for_without_a_pause(
    side: Side, end: RegistryError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SimulatedStore, timeout: float) -> list[Change]:
        raise end

    monkeypatch.setattr(SimulatedStore, "changes", fail)
    while side.clock.now < 60.0:
        side.clock.now += side.follower.step(0.0)
    assert side.follower.n_lists <= 5 + 2 * 60.0 / LONGEST_PAUSE_S
    assert not side.follower.is_up
    monkeypatch.undo()
    for _ in range(2):
        side.clock.now += side.follower.step(0.0)
    side.clock.now += LONGEST_PAUSE_S
    assert side.follower.is_up
    side.server.break_watches()
    assert side.follower.step(0.0) < 0.25, "one that has lasted is taken up again soon"


def test_names_that_come_and_go_are_forgotten(side: Side) -> None:
    side.known()
    versions = iter(range(100, 10**9))
    told: list[Change] = []
    side.server.changes_after = lambda since, now: told  # type: ignore[method-assign]
    for i in range(10_000):
        told[:] = [Change(f"n{i}", b"record", next(versions)), Change(f"n{i}", None, next(versions))]
        side.follower.step(0.0)
    assert len(side.follower._gone) < 5_000
    told[:] = [Change("n0", b"late", 100), Change("n9999", b"late", 100)]
    assert side.known() == {}
    told[:] = [Change("n0", b"anew", next(versions))]
    assert side.known() == {"n0": b"anew"}


def test_the_last_that_was_known_stays_while_the_store_is_away(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    side.server.write("a", b"1", 0.0)
    side.known()
    side.server.is_up = False
    assert side.known() == {"a": b"1"}
    assert not side.follower.listing.is_current
    side.server.is_up = True
    assert side.known() == {"a": b"1"}
    assert side.follower.listing.is_current
    assert caplog.text.count("can't be read") == 1
    assert "answers again" in caplog.text


def test_a_record_is_renewed_and_ends_with_who_renews_it(side: Side) -> None:
    side.keeper.claim(b"1", (), deadline=5.0)
    for _ in range(20):
        side.clock.now += side.keeper.step()
    assert side.clock.now > 3 * TTL
    assert side.known() == {"n1": b"1"}
    side.clock.now += TTL + 1
    assert side.known() == {}


def test_a_record_that_is_gone_is_put_again(side: Side) -> None:
    side.keeper.claim(b"1", (), deadline=5.0)
    for harm in (lambda: side.server.drop_lease("n1", 0.0), lambda: side.server.write("n1", None, 0.0)):
        harm()
        assert side.known() == {}
        side.clock.now += side.keeper.step()
        side.keeper.step()
        assert side.known() == {"n1": b"1"}
    assert side.keeper.n_lost == 2


def test_a_claim_is_not_written_over_what_was_not_read(side: Side) -> None:
    side.server.write("n1", b"9", 0.0)
    assert side.keeper.claim(b"1", (), deadline=5.0) == b"9"
    assert side.known() == {"n1": b"9"}
    assert side.keeper.claim(b"1", [b"9"], deadline=5.0) is None
    assert side.known() == {"n1": b"1"}


def test_only_what_it_outranks_is_overwritten_later(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    side.keeper.claim(b"5", (), deadline=5.0)
    side.server.write("n1", b"9", 0.0)
    side.clock.now += TTL / 2
    side.keeper.step()
    assert side.known() == {"n1": b"9"}
    assert "has this node's name" in caplog.text
    side.server.write("n1", b"4", 0.0)
    side.keeper.step()
    assert side.known() == {"n1": b"5"}


def test_an_answer_that_was_lost_is_made_up_for(side: Side) -> None:
    store = side.keeper._store
    put = store.put

    def put_and_lose_the_answer(*args: object) -> int:
        put(*args)  # type: ignore[arg-type]
        raise RegistryError("breaks off")

    store.put = put_and_lose_the_answer  # type: ignore[method-assign]
    side.keeper.wanted = b"1"
    side.keeper.step()
    store.put = put  # type: ignore[method-assign]
    side.keeper.step()
    side.clock.now += TTL / 2
    assert side.keeper.step() > 0
    assert side.known() == {"n1": b"1"}
    assert side.keeper.n_lost == 0


def test_leaving_takes_the_record_away_but_not_that_of_another(side: Side) -> None:
    side.keeper.claim(b"1", (), deadline=5.0)
    side.keeper.leave(0.4)
    assert side.known() == {}
    side.keeper.claim(b"1", (), deadline=5.0)
    side.server.write("n1", b"2", 0.0)
    side.keeper.leave(0.4)
    assert side.known() == {"n1": b"2"}


def test_a_record_that_could_not_be_taken_away_is_taken_away_later(side: Side) -> None:
    side.keeper.claim(b"1", (), deadline=5.0)
    side.keeper.wanted = None
    side.server.is_up = False
    assert side.keeper.step() < 1.0
    side.server.is_up = True
    assert side.keeper.step() == math.inf
    assert side.known() == {}
