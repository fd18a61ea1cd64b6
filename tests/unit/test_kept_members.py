"""What members say of a pool whose memory outlives its process, and what they believe of others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from p2pkv.directory.membership.base import Claim, Identity, KeptBoots, Network, ProbeReply
from p2pkv.directory.membership.entry import claim_boot_epoch
from p2pkv.directory.membership.probing import _differ
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.timing import SystemClock, Timing
from p2pkv.directory.view import Member, Report, State, View, decode, encode, flaw, node_key

OTHER = Member("b", 9, "10.0.0.2:7000", kept_since=5)
BURIAL_S = 600.0


def roster_of(member: Member) -> Roster:
    return Roster(member, BURIAL_S)


def take(roster: Roster, record: Member) -> Member:
    roster.take(record, now=0.0, is_proven=lambda _: False)
    return roster.view()[record.node_id]


def test_a_record_says_since_when_its_memory_is_kept() -> None:
    assert decode(encode("b", [OTHER])).members == (OTHER,)
    unkept = replace(OTHER, kept_since=0)
    assert decode(encode("b", [unkept])).members == (unkept,)
    assert len(encode("b", [unkept])) < len(encode("b", [OTHER]))  # left out: as nodes of before wrote it
    assert (OTHER.first_boot, unkept.first_boot) == (5, 9)


@pytest.mark.parametrize("kept_since", [-1, 10])
def test_memory_is_not_kept_since_a_boot_that_was_none(kept_since: int) -> None:
    assert "kept since" in str(flaw(replace(OTHER, kept_since=kept_since)))


def test_who_may_come_back() -> None:
    for state in State:
        member = replace(OTHER, state=state)
        assert member.may_come_back == (state in (State.DEAD, State.LEFT))
        assert not replace(member, kept_since=0).may_come_back
        assert not replace(member, is_draining=True).may_come_back  # it has handed its pages over


def test_a_record_that_was_passed_on_by_who_does_not_know_of_it_takes_nothing_away() -> None:
    passed_on = replace(OTHER, kept_since=0)
    roster = roster_of(Member("a", 1, "10.0.0.1:7000"))
    assert take(roster, passed_on).kept_since == 0
    assert take(roster, OTHER) == OTHER
    assert take(roster, passed_on) == OTHER
    dead = take(roster, replace(passed_on, state=State.DEAD))
    assert (dead.state, dead.kept_since) == (State.DEAD, 5)
    assert take(roster, replace(passed_on, boot_epoch=10)).kept_since == 0


def test_a_node_that_has_announced_all_says_that_earlier_boots_are_over() -> None:
    own = roster_of(OTHER)
    peer = roster_of(Member("a", 1, "10.0.0.1:7000"))
    take(peer, own.own)
    own.settle()
    assert (own.own.kept_since, own.own.incarnation) == (9, 1)
    assert take(peer, own.own).kept_since == 9
    own.settle()  # no news
    assert own.own.incarnation == 1
    unkept = roster_of(replace(OTHER, kept_since=0))
    unkept.settle()
    assert unkept.own == replace(OTHER, kept_since=0)


def test_a_node_that_goes_on_under_another_boot_has_that_one_only() -> None:
    roster = roster_of(OTHER)
    roster.reboot(12)
    assert roster.own.kept_since == 12
    roster.reboot(13, kept_since=12)
    assert (roster.own.boot_epoch, roster.own.kept_since) == (13, 12)
    unkept = roster_of(replace(OTHER, kept_since=0))
    unkept.reboot(12)
    assert unkept.own.kept_since == 0


def test_a_node_that_has_settled_hears_that_it_was_taken_for_dead_before() -> None:
    roster = roster_of(OTHER)
    roster.settle()
    dead = replace(OTHER, state=State.DEAD)
    for is_news in (True, False):
        roster.was_dead = False
        roster.take(dead, now=0.0, is_proven=lambda _: False)
        assert (roster.was_dead, roster.own.incarnation) == (is_news, 1)


def test_what_is_known_of_the_boots_of_members_is_a_change_that_digests_do_not_show() -> None:
    dead = replace(OTHER, state=State.DEAD)
    for old, new in ((OTHER, replace(OTHER, kept_since=0)), (dead, replace(dead, kept_since=0))):
        assert View([old]).digest == View([new]).digest
        assert _differ(View([old]), View([new]))
        assert not _differ(View([old]), View([old]))
    assert _differ(View([dead]), View())  # it is waited for no more
    unkept = replace(dead, kept_since=0)
    assert not _differ(View([unkept]), View())


class Probed:
    """A network where one boot of the node answers, or nobody does."""

    def __init__(self, living: int = 0) -> None:
        self.living = living
        self.timeouts: list[float] = []

    def probe(self, addresses: Sequence[str], timeout: float) -> list[ProbeReply | None]:
        self.timeouts.append(timeout)
        reply = ProbeReply(node_key("b"), self.living, 0) if self.living else None
        return [reply] * len(addresses)


def claim(network: Probed, kept: KeptBoots | None, *earlier: Member, remembered: int = 0) -> Claim:
    return claim_boot_epoch(
        cast(Network, network),
        Identity("b", kept=kept, last_boot_epoch=remembered),
        [Report("a", (*earlier,))],
        "10.0.0.2:8000",
        clock=SystemClock(),
        timing=Timing(),
        deadline=SystemClock().monotonic() + 60.0,
    )


def test_the_boot_that_had_the_memory_last_is_not_waited_for() -> None:
    kept, timing = KeptBoots(5, 9), Timing()
    network = Probed()
    assert claim(network, kept, OTHER).kept_since == 5
    assert claim(network, None, OTHER).kept_since == 0
    assert claim(network, kept, replace(OTHER, boot_epoch=8)).kept_since == 5
    namesakes = [OTHER, replace(OTHER, boot_epoch=11)]  # one of which may have the address now
    for records in (namesakes, namesakes[::-1]):
        claim(network, kept, *records)
    assert network.timeouts == [timing.ended_timeout] + 4 * [timing.duplicate_timeout]


def test_a_namesake_that_has_its_number_is_found_nevertheless() -> None:
    with pytest.raises(Exception, match="in use by a live node"):
        claim(Probed(living=9), KeptBoots(5, 9), OTHER)


@pytest.mark.parametrize("remembered", [0, 12])
def test_memory_is_that_of_earlier_boots_only_if_nobody_else_was_this_node_meanwhile(remembered: int) -> None:
    later = () if remembered else (replace(OTHER, boot_epoch=12),)
    claimed = claim(Probed(), KeptBoots(5, 9), *later, remembered=remembered)
    assert claimed.kept_since == claimed.boot_epoch
    fresh = claim(Probed(), KeptBoots(0, 0), OTHER)
    assert fresh.kept_since == fresh.boot_epoch > OTHER.boot_epoch
    assert claim(Probed(), KeptBoots(5, 9)).kept_since == 5  # nobody remembers anybody
