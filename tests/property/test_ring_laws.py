"""Laws of the ring, over any clusters."""

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.directory.ring import NOBODY, Ring, moved
from p2pkv.directory.view import Member

KEYS = np.random.default_rng(5).integers(0, 256, (2000, 16), np.uint8)

node_ids = st.text("abcdefghij0123456789-", min_size=1, max_size=12)
weights = st.sampled_from([0.0, 0.001, 0.5, 1.0, 2.0, 16.0])


@st.composite
def clusters(draw, min_size=1):
    ids = draw(st.lists(node_ids, min_size=min_size, max_size=12, unique=True))
    return [Member(node_id, 1, "h:1", weight=draw(weights)) for node_id in ids]


replica_counts = st.integers(1, 4)


def owner_ids(ring):
    names = np.array([*(member.node_id for member in ring.members), ""])
    return names[ring.owners(KEYS)]


@settings(deadline=None, max_examples=60)
@given(clusters(), replica_counts)
def test_a_member_without_weight_owns_nothing(members, replicas):
    without = {member.node_id for member in members if member.weight == 0}
    assert without.isdisjoint(owner_ids(Ring(members, replicas)).ravel().tolist())


@settings(deadline=None, max_examples=60)
@given(clusters(), replica_counts)
def test_replicas_are_distinct_and_as_many_as_there_can_be(members, replicas):
    owners = Ring(members, replicas).owners(KEYS)
    n_real = min(replicas, sum(member.weight > 0 for member in members))
    assert (owners[:, :n_real] != NOBODY).all()
    assert (owners[:, n_real:] == NOBODY).all()
    ordered = np.sort(owners[:, :n_real], axis=1)
    assert (np.diff(ordered, axis=1) > 0).all()


@settings(deadline=None, max_examples=40)
@given(clusters(), replica_counts, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(members, replicas, random):
    shuffled = list(members)
    random.shuffle(shuffled)
    assert (Ring(members, replicas).owners(KEYS) == Ring(shuffled, replicas).owners(KEYS)).all()


@settings(deadline=None, max_examples=60)
@given(clusters(min_size=2), replica_counts)
def test_a_newcomer_takes_over_and_nothing_else_moves(members, replicas):
    newcomer = members[-1].node_id
    old, new = Ring(members[:-1], replicas), Ring(members, replicas)
    before, now = owner_ids(old), owner_ids(new)
    for was, becomes in zip(before, now, strict=True):
        assert set(becomes) - set(was) - {""} <= {newcomer}
    mask = moved(old, new, KEYS)
    assert (mask == (now == newcomer).any(axis=1)).all()


@settings(deadline=None, max_examples=60)
@given(clusters(min_size=2), replica_counts)
def test_a_leaver_costs_only_its_own_keys(members, replicas):
    leaver = members[-1].node_id
    old, new = Ring(members, replicas), Ring(members[:-1], replicas)
    untouched = ~(owner_ids(old) == leaver).any(axis=1)
    assert (owner_ids(old)[untouched] == owner_ids(new)[untouched]).all()
    assert not moved(old, new, KEYS)[untouched].any()


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 32), st.text("abcdef", min_size=1, max_size=6))
def test_shares_are_balanced(n_members, prefix):
    ring = Ring([Member(f"{prefix}{i}", 1, "h:1") for i in range(n_members)], 2)
    many = np.random.default_rng(6).integers(0, 256, (20_000, 16), np.uint8)
    shares = np.bincount(ring.owners(many).ravel(), minlength=n_members) * n_members / (2 * len(many))
    assert shares.max() < 1.4
    assert shares.min() > 0.6


@settings(deadline=None, max_examples=60)
@given(clusters(min_size=2), replica_counts, st.integers(1, 5))
def test_one_join_or_loss_moves_the_entries_of_two_seats_at_most(members, replicas, seats):
    with mock.patch("p2pkv.directory.ring.SEATS", seats):
        few, many = Ring(members[:-1], replicas), Ring(members, replicas)
    before, after = owner_ids(few), owner_ids(many)
    holders, holders_then = set(before.ravel().tolist()) - {""}, set(after.ravel().tolist()) - {""}
    assert len(holders_then) <= seats
    assert holders_then - holders <= {members[-1].node_id}
    assert len(holders - holders_then) <= 1
    concerned = list(holders ^ holders_then)
    untouched = ~(np.isin(before, concerned).any(axis=1) | np.isin(after, concerned).any(axis=1))
    assert (before[untouched] == after[untouched]).all()
    for old, new in ((few, many), (many, few)):
        assert not moved(old, new, KEYS)[untouched].any()
