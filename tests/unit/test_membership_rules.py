"""The rules the engines are made of: detector, roster, rotation, punctuality."""

from dataclasses import replace
from random import Random

from p2pkv.directory.membership.detector import FailureDetector
from p2pkv.directory.membership.health import MOST, Health
from p2pkv.directory.membership.news import News
from p2pkv.directory.membership.roster import Roster
from p2pkv.directory.membership.rotation import PROBES_A_ROUND, Rotation
from p2pkv.directory.membership.timing import Punctuality, Timing
from p2pkv.directory.view import Member, State, View
from p2pkv.testing.simulated_network import SimulatedClock

OWN = Member("own", 5, "h0:7000")
PEER = Member("peer", 5, "h1:7000")
SUSPECT = replace(PEER, state=State.SUSPECT)


def roster_with(*members):
    roster = Roster(OWN, burial=600.0)
    for member in members:
        roster.take(member, now=0.0, is_proven=lambda _: False)
    return roster


def test_time_slept_through_does_not_count_against_a_suspect():
    detector = FailureDetector(Timing())
    detector.observe(View([OWN, SUSPECT]), now=0.0)
    assert detector.overdue(1.0) == ["peer"]
    detector.postpone(10.0)
    assert detector.overdue(10.9) == []
    assert detector.overdue(detector.next_deadline()) == ["peer"]


def test_a_suspect_that_answers_has_its_time_anew():
    detector = FailureDetector(Timing())
    detector.observe(View([OWN, SUSPECT]), now=0.0)
    detector.answered(SUSPECT, 0.9)
    assert detector.overdue(1.5) == []
    assert detector.overdue(2.0) == ["peer"]


def test_one_miss_is_doubt_and_two_are_suspicion():
    detector = FailureDetector(Timing())
    assert [detector.missed(PEER), detector.is_doubtful(PEER), detector.missed(PEER)] == [False, True, True]
    detector.answered(PEER, 1.0)
    assert not detector.is_doubtful(PEER)


def test_a_late_answer_speaks_for_the_time_of_its_question_only():
    detector = FailureDetector(Timing())
    detector.missed(PEER, asked_at=1.0)
    detector.missed(PEER, asked_at=1.5)
    assert not detector.answered_late(PEER, 1.0)
    assert detector.is_doubtful(PEER)
    assert detector.missed(PEER, asked_at=2.0)
    assert detector.answered_late(PEER, 2.0)
    assert not detector.is_doubtful(PEER)


def test_a_late_answer_gives_a_suspect_time_from_its_question_on():
    detector = FailureDetector(Timing())
    detector.observe(View([OWN, SUSPECT]), now=10.0)
    detector.answered_late(SUSPECT, 8.0)
    assert detector.overdue(11.0) == ["peer"]
    detector.answered_late(SUSPECT, 9.5)
    assert detector.overdue(11.4) == []
    assert detector.overdue(11.5) == ["peer"]


def test_a_late_answer_is_no_recent_proof_of_life():
    detector = FailureDetector(Timing())
    detector.answered_late(PEER, 1.0)
    assert detector.is_proven(PEER, 1.5)
    assert not detector.is_proven(PEER, 3.0)


class Judge:
    """Rounds of one node's health, half a second apart times its stretch."""

    def __init__(self):
        self.health = Health(Timing())
        self.now = 0.0

    def rounds(self, n, ages=(), n_asked=8, n_silent=0):
        for _ in range(n):
            self.now += 0.5 * self.health.stretch
            for i, age in enumerate(ages):
                self.health.heard_late(f"n{i}", age)
            self.health.judged(self.now, n_asked=n_asked, n_silent=n_silent)
        return self.health.stretch


def test_who_finds_that_most_are_late_takes_longer_and_the_later_the_longer():
    judge = Judge()
    assert judge.rounds(1, ages=[0.5] * 4) == 2
    assert judge.rounds(1, ages=[5.0] * 4) == 6
    assert judge.rounds(9, ages=[5.0] * 4) == 8
    assert judge.rounds(1, ages=[50.0] * 4) == MOST


def test_a_few_late_members_of_many_and_the_silence_of_all_change_nothing():
    assert Judge().rounds(9, ages=[5.0] * 3) == 1
    assert Judge().rounds(9, n_silent=8) == 1


def test_who_is_a_little_late_lengthens_periods_a_little():
    assert Judge().rounds(99, ages=[0.5] * 8) == 3


def test_a_single_peer_that_is_late_is_given_time():
    assert Judge().rounds(9, ages=[0.5], n_asked=1) == 3


def test_it_is_as_quick_as_before_when_most_are_on_time_and_not_while_they_are_silent():
    judge = Judge()
    judge.rounds(9, ages=[9.0] * 8)
    assert judge.rounds(5, n_silent=5) == MOST
    assert judge.rounds(3, ages=[9.0] * 3, n_silent=3) == 2
    assert judge.rounds(9) == 1


def test_periods_that_were_too_short_are_not_tried_again_at_once():
    judge = Judge()
    judge.rounds(2, ages=[0.5] * 8)
    assert judge.rounds(9) == 2
    assert judge.rounds(2) == 1


def test_one_member_that_stays_late_keeps_nobody_slow():
    judge = Judge()
    judge.rounds(5, ages=[5.0] * 2, n_asked=2)
    assert judge.rounds(20, ages=[0.9], n_asked=3, n_silent=1) == 1


def test_proof_of_life_is_of_one_boot_and_does_not_last():
    detector = FailureDetector(Timing())
    detector.answered(PEER, 1.0)
    assert detector.is_proven(PEER, 1.5)
    assert not detector.is_proven(replace(PEER, boot_epoch=6), 1.5)
    assert not detector.is_proven(PEER, 9.0)
    detector.missed(PEER)
    assert not detector.is_proven(PEER, 1.5)


def test_silence_of_an_earlier_boot_does_not_harm_the_next():
    rebooted = replace(PEER, boot_epoch=6)
    roster = roster_with(PEER, rebooted)
    roster.suspect(PEER, 1.0)
    assert roster.view()["peer"] == rebooted
    roster.suspect(rebooted, 1.0)
    assert roster.view()["peer"].state is State.SUSPECT


def test_an_older_record_is_not_believed():
    roster = roster_with(replace(PEER, incarnation=1), SUSPECT, replace(PEER, boot_epoch=4, incarnation=9))
    assert roster.view()["peer"] == replace(PEER, incarnation=1)


def test_a_view_stays_the_same_object_until_something_changes():
    roster = roster_with(PEER)
    view = roster.view()
    roster.take(PEER, now=1.0, is_proven=lambda _: False)
    assert roster.view() is view


def test_the_rotation_probes_everybody_before_anybody_twice():
    members = [Member(f"n{i}", 1, "h:1") for i in range(3 * PROBES_A_ROUND)]
    rotation = Rotation(Random(1))
    rounds = [{member.node_id for member in rotation.next(members)} for _ in range(3)]
    assert [len(probed) for probed in rounds] == [PROBES_A_ROUND] * 3
    assert set.union(*rounds) == {member.node_id for member in members}


OURS, OTHER = 1, 2


def test_a_difference_that_stays_the_same_is_told_of_first_and_leads_to_an_exchange_then():
    news = News()
    assert [news.sort_out({"a": OTHER}, OURS, 0.5 * i) for i in range(4)] == [
        (["a"], []),
        (["a"], []),
        ([], ["a"]),
        ([], ["a"]),  # until one has taken place
    ]
    news.exchanged("a")
    assert news.sort_out({"a": OTHER}, OURS, 2.0) == (["a"], [])


def test_a_difference_that_stays_the_same_leads_to_an_exchange_however_seldom_it_is_looked_at():
    news = News()
    assert news.sort_out({"a": OTHER}, OURS, 0.0) == (["a"], [])
    assert news.sort_out({"b": OURS}, OURS, 1.0) == ([], [])  # others' turns come in between
    assert news.sort_out({"a": OTHER}, OURS, 60.0) == ([], ["a"])


def test_while_digests_change_news_is_under_way_and_is_waited_for_as_long_as_it_is_news():
    news = News()
    for i in range(10):
        assert news.sort_out({"a": 100 + i}, OURS, 0.5 * i) == (["a"], [])
    assert news.sort_out({"a": 110}, OURS, 5.0) == ([], ["a"])


def test_of_two_differences_that_are_long_apart_each_is_waited_for():
    news = News()
    assert news.sort_out({"a": OTHER}, OURS, 0.0) == (["a"], [])
    assert news.sort_out({"a": 3}, 4, 16.0) == (["a"], [])
    assert news.sort_out({"a": OURS}, OURS, 16.5) == ([], [])
    assert news.sort_out({"a": 3}, 4, 17.5) == (["a"], [])


def test_lateness_is_what_exceeds_the_promises():
    clock = SimulatedClock(0.0)
    punctuality = Punctuality(clock, tolerance=0.3)
    punctuality.promise(1.0)
    clock.now = 1.2
    assert punctuality.lateness() == 0.0
    punctuality.promise(1.0)
    clock.now = 4.2
    assert punctuality.lateness() == 2.0
    clock.now = 4.6
    assert punctuality.lateness() > 0.3


def test_computing_is_not_lateness():
    clock = SimulatedClock(0.0)
    punctuality = Punctuality(clock, tolerance=0.3)
    punctuality.promise(0.5)
    clock.now, clock.busy_s = 5.5, 5.0
    assert punctuality.lateness() == 0.0
    assert punctuality.busy_s == 5.0
    clock.now += 5.0
    assert punctuality.lateness() == 5.0


def test_who_has_been_very_late_and_is_a_little_late_now_is_waited_for_less():
    judge = Judge()
    assert judge.rounds(9, ages=[8.0] * 8) == MOST
    assert judge.rounds(9, ages=[0.5] * 8) == 3


def test_the_silence_of_most_keeps_nobody_slow_for_ever():
    judge = Judge()
    judge.rounds(3, ages=[3.0] * 8)
    assert judge.rounds(40, n_silent=5) == 1


def test_mistakes_lengthen_periods_once_in_ten_seconds():
    health = Health(Timing())
    for tenths in range(100):
        health.erred(tenths / 10)
    assert health.stretch == 2
    health.erred(10.0)
    assert health.stretch == 3
