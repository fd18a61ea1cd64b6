"""The ring: examples and edges. Its laws are in ``tests/property/test_ring_laws.py``."""

import os
import subprocess
import sys

import numpy as np
import pytest

from p2pkv.directory.ring import NOBODY, SEATS, Ring, moved
from p2pkv.directory.view import Member, State
from p2pkv.errors import UsageError


def members(n_members, **fields):
    return [Member(f"n{i}", 1, f"h{i}:7000", **fields) for i in range(n_members)]


def keys(n_keys, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n_keys, 16), np.uint8)


def test_without_members_nobody_owns_anything():
    assert (Ring([], 2).owners(keys(5)) == NOBODY).all()


def test_fewer_members_than_replicas_leave_nobody_in_the_last_places():
    owners = Ring(members(1), 3).owners(keys(10))
    assert (owners[:, 0] == 0).all()
    assert (owners[:, 1:] == NOBODY).all()


def test_no_keys_have_no_owners():
    assert Ring(members(3), 2).owners(keys(0)).shape == (0, 2)
    assert moved(Ring(members(3), 2), Ring(members(4), 2), keys(0)).shape == (0,)


def test_owners_are_int32_indexes_of_members():
    ring = Ring(members(4), 2)
    owners = ring.owners(keys(1000))
    assert owners.dtype == np.int32
    assert set(owners.ravel().tolist()) == {0, 1, 2, 3}
    assert [member.node_id for member in ring.members] == ["n0", "n1", "n2", "n3"]


def test_keys_need_not_be_contiguous():
    ring = Ring(members(4), 2)
    many = keys(100)
    assert (ring.owners(many[::3]) == ring.owners(many)[::3]).all()
    assert (ring.owners(np.asfortranarray(many)) == ring.owners(many)).all()


@pytest.mark.parametrize("bad", [np.zeros((3, 8), np.uint8), np.zeros(16, np.uint8), np.zeros((3, 16))])
def test_wrong_keys_are_refused(bad):
    with pytest.raises(UsageError):
        Ring(members(2), 2).owners(bad)


def test_no_replicas_are_refused():
    with pytest.raises(UsageError):
        Ring(members(2), 0)


def test_the_suspected_stay_and_the_dead_and_departed_go():
    states = zip("abcd", State, strict=True)
    ring = Ring([Member(name, 1, "h:1", state=state) for name, state in states], 2)
    assert [member.node_id for member in ring.members] == ["a", "b"]


def test_suspicion_moves_nothing():
    suspected = [*members(3), Member("n3", 1, "h3:7000", state=State.SUSPECT)]
    assert not moved(Ring(members(4), 2), Ring(suspected, 2), keys(1000)).any()


def test_a_member_in_another_boot_counts_as_gained():
    rebooted = [*members(3), Member("n3", 2, "h3:7000")]
    ring = Ring(members(4), 2)
    mask = moved(ring, Ring(rebooted, 2), keys(1000))
    assert (mask == (ring.owners(keys(1000)) == 3).any(axis=1)).all()


def test_after_a_death_exactly_its_keys_move():
    before, after = Ring(members(5), 2), Ring(members(4), 2)
    mask = moved(before, after, keys(1000))
    assert (mask == (before.owners(keys(1000)) == 4).any(axis=1)).all()


def test_losing_an_owner_without_a_successor_moves_nothing():
    assert not moved(Ring(members(2), 2), Ring(members(1), 2), keys(100)).any()


def test_weight_scales_the_share():
    heavy = [*members(3), Member("n3", 1, "h3:7000", weight=3.0)]
    share = (Ring(heavy, 1).owners(keys(20_000)) == 3).mean()
    assert 0.4 < share < 0.6


def test_placement_is_the_same_in_every_process():
    program = (
        "import numpy as np\n"
        "from p2pkv.directory.ring import Ring\n"
        "from p2pkv.directory.view import Member\n"
        "for order in ((2, 0, 3, 1), range(99, -1, -1)):\n"  # the second has more members than there are seats
        "    ring = Ring([Member(f'n{i}', 1, f'h{i}:7000') for i in order], 2)\n"
        "    keys = np.random.default_rng(0).integers(0, 256, (500, 16), np.uint8)\n"
        "    print(ring.owners(keys).tobytes().hex())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = [Ring(members(n), 2).owners(keys(500)).tobytes().hex() for n in (4, 100)]
    assert outputs == {"\n".join(here)}


def test_placement_never_changes_between_releases():
    # moving entries of a running cluster during an upgrade would cost every page once
    assert Ring(members(4), 2).owners(keys(6)).tolist() == [[3, 1], [2, 1], [3, 0], [2, 3], [3, 1], [3, 0]]
    of_seats = Ring(members(1000), 2)
    assert of_seats.owners(keys(4)).tolist() == [[960, 686], [439, 87], [241, 765], [339, 875]]


def test_as_many_members_as_there_are_seats_hold_entries():
    many = keys(20_000)
    for n_members in (SEATS, SEATS + 1, 1000):
        ring = Ring(members(n_members), 2)
        assert len(np.unique(ring.owners(many))) == SEATS
        assert sum(ring.share(member.key) > 0 for member in ring.members) == SEATS


def test_who_has_no_seat_comes_and_goes_unnoticed():
    everybody = members(200)
    ring = Ring(everybody, 2)
    holders = {ring.members[index].node_id for index in np.unique(ring.owners(keys(20_000)))}
    for member in everybody:
        without = Ring([other for other in everybody if other is not member], 2, like=ring)
        assert without.is_like(ring) == (member.node_id not in holders)
        if member.node_id not in holders:
            assert without.points is ring.points
            before = [ring.members[index] for index in ring.owners(keys(500)).ravel()]
            assert before == [without.members[index] for index in without.owners(keys(500)).ravel()]


def test_a_members_weight_is_its_chance_of_a_seat():
    # a quarter of 1,000 members weighs three times as much as the others: half of the seats are theirs, by the mean
    n_heavy = 0
    for cluster in range(20):
        weighed = [Member(f"{cluster}-{i}", 1, "h:1", weight=3.0 if i % 4 == 0 else 1.0) for i in range(1000)]
        ring = Ring(weighed, 1)
        n_heavy += sum(ring.share(member.key) > 0 for member in weighed[::4])
    assert 0.43 < n_heavy / (20 * SEATS) < 0.57
