"""Fetch or recompute: what is decided in plain cases. The hunt `recompute` has those that are not."""

from __future__ import annotations

import numpy as np
import pytest

from p2pkv.errors import UsageError
from p2pkv.metrics import FETCH_CHOICES, FETCH_REASONS, Metrics
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.policy import Choice, Policy, Reason
from p2pkv.recompute.rates import FetchRates, PrefillRate, Source

MEMORY, DISK = Source(1), Source(2, is_on_disk=True)
PAGE = 1 << 20
TOKENS = 64


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hits(n: int = 20, *, n_memory: int | None = None, first: int = 0) -> Hits:
    """Return ``n`` pages, the first ``n_memory`` of which (all by default) lie in memory, the others on disk."""
    of_page = np.where(np.arange(n) < (n if n_memory is None else n_memory), 0, 1)
    n_tokens = first + n * TOKENS + 7
    return Hits([MEMORY, DISK], of_page, np.full(n, PAGE, np.int64), TOKENS, first, n_tokens)


def measured(*, memory: float, disk: float, token_s: float, clock: Clock | None = None) -> Policy:
    """Return a policy that has seen pages come at so many bytes a second, and tokens computed."""
    policy = Policy("measured", Metrics(), clock=clock or Clock())
    for n in (5, 40, 10, 20):
        for n_memory, speed in ((n, memory), (0, disk)):
            decision = policy.decide(hits(n, n_memory=n_memory))
            decision.n_pages = n  # whatever was decided
            policy.fetched(decision, n * PAGE / speed)
        policy.computed(0, n * TOKENS, n * TOKENS * token_s)
    return policy


def test_what_is_quicker_is_done() -> None:
    quick_link = measured(memory=1e9, disk=1e9, token_s=1e-3).decide(hits())
    assert (quick_link.choice, quick_link.n_pages) == (Choice.FETCH_ALL, 20)
    slow_link = measured(memory=1e6, disk=1e6, token_s=1e-5).decide(hits())
    assert (slow_link.choice, slow_link.n_pages) == (Choice.RECOMPUTE, 0)


def test_of_pages_in_memory_and_on_a_slow_disk_the_first_are_fetched() -> None:
    decision = measured(memory=1e9, disk=1e6, token_s=1e-4).decide(hits(20, n_memory=8))
    assert (decision.choice, decision.n_pages) == (Choice.FETCH_PART, 8)


def test_until_both_were_measured_all_is_fetched() -> None:
    policy = Policy("measured", Metrics())
    policy.computed(0, 1000, 0.1)
    decision = policy.decide(hits())
    assert (decision.choice, decision.reason, decision.limit_s) == (Choice.FETCH_ALL, Reason.UNMEASURED, None)


@pytest.mark.parametrize(("kind", "n_pages"), [("always", 20), ("never", 0)])
def test_a_setting_is_followed_whatever_was_measured(kind: str, n_pages: int) -> None:
    policy = Policy(kind, Metrics(), tokens_per_second=1e6)
    for seconds in (1e-6, 1e3):
        decision = policy.decide(hits())
        assert (decision.n_pages, decision.reason) == (n_pages, Reason.SETTING)
        policy.fetched(decision, seconds)


def test_what_is_being_fetched_already_is_waited_for_only_while_that_is_quicker() -> None:
    # a prompt takes 20 MiB / 1 GB/s to fetch, and ten times as long to compute
    policy = measured(memory=1e9, disk=1e9, token_s=20 * PAGE / 1e9 / (20 * TOKENS) * 10)
    decisions = [policy.decide(hits()) for _ in range(15)]
    assert decisions[0].reason is Reason.QUICKER
    assert decisions[5].choice is Choice.FETCH_ALL
    assert decisions[5].reason is Reason.WAITS
    assert decisions[-1].choice is not Choice.FETCH_ALL
    for decision in decisions:
        policy.dropped(decision)
    assert policy.decide(hits()).wait_s == 0


def test_a_queue_before_the_engine_is_time_to_fetch_in() -> None:
    policy = measured(memory=1e7, disk=1e7, token_s=1e-5)
    assert policy.decide(hits()).choice is Choice.RECOMPUTE
    assert policy.decide(hits(), queued_s=10.0).choice is Choice.FETCH_ALL


def test_a_fetch_is_given_up_when_computing_would_long_have_been_done() -> None:
    decision = measured(memory=1e9, disk=1e9, token_s=1e-3).decide(hits())
    assert decision.limit_s == pytest.approx(1.5 * 20 * TOKENS * 1e-3, rel=0.1)


def test_a_failure_is_believed_at_once_and_forgotten_with_as_much_as_comes() -> None:
    policy = measured(memory=1e9, disk=1e9, token_s=1e-4)
    decision = policy.decide(hits())
    policy.fetched(decision, 1.0, np.ones(decision.n_pages, bool))
    assert policy.decide(hits()).choice is not Choice.FETCH_ALL
    for n in (1, 4, 16, 20):
        decision = policy.decide(hits(n))
        decision.n_pages = n  # whatever was decided
        policy.fetched(decision, n * PAGE / 1e9)
    assert policy.decide(hits()).choice is Choice.FETCH_ALL


def test_regret_is_what_the_better_simple_policy_would_have_saved() -> None:
    policy = measured(memory=1e9, disk=1e9, token_s=1e-3)
    decision = policy.decide(hits())
    policy.settled(decision, 5.0)  # computing all of it takes 1.287 s
    counters = policy._metrics.counters()
    seconds = {
        name: counters[f'p2pkv_recompute_seconds_total{{figure="{name}"}}'] for name in ("real", "never")
    }
    assert seconds == {"real": 5.0, "never": pytest.approx(1.287, rel=0.05)}
    assert counters['p2pkv_recompute_seconds_total{figure="regret"}'] == pytest.approx(5.0 - seconds["never"])
    assert counters['p2pkv_recompute_pages_total{choice="fetched"}'] >= 20


def test_the_rates_tell_a_fixed_part_and_attention_from_the_rest() -> None:
    fetches, prefill = FetchRates(), PrefillRate()
    for n in (1, 10, 100, 3, 30, 300) * 4:
        fetches.add(MEMORY, n * PAGE, 0.01 + n * PAGE / 1e9, has_failed=False)
        prefill.add(0, n * 100, 0.005 + n * 100 * 1e-4 + 1e-9 * (n * 100) ** 2 / 2)
    expected = fetches.seconds(MEMORY, np.array([0, PAGE, 200 * PAGE]))
    assert expected == pytest.approx([0, 0.01 + PAGE / 1e9, 0.01 + 200 * PAGE / 1e9], rel=0.2)
    late = prefill.seconds(np.array([20000]), np.array([5000]))[0]
    assert late == pytest.approx(0.005 + 0.5 + 1e-9 * 5000 * 22500, rel=0.1)


def test_a_jump_is_followed_within_a_few_samples() -> None:
    rates = FetchRates()
    for seconds in (*[0.001] * 50, *[0.02] * 5):
        rates.add(MEMORY, PAGE, seconds, has_failed=False)
    assert 0.015 < rates.seconds(MEMORY, np.array([PAGE]))[0] < 0.04


def test_an_owner_that_is_new_is_taken_for_one_of_its_kind() -> None:
    rates = FetchRates()
    rates.add(MEMORY, PAGE, 0.001, has_failed=False)
    assert rates.knows(Source(77))
    assert not rates.knows(Source(77, is_on_disk=True))
    assert rates.seconds(Source(77), np.array([PAGE]))[0] == pytest.approx(0.001, rel=0.05)


def test_hits_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(UsageError, match="more than the prompt's 100"):
        Hits([MEMORY], np.zeros(2, np.int64), np.ones(2, np.int64), 64, 0, 100)
    with pytest.raises(UsageError, match="none of the 1 given"):
        Hits([MEMORY], np.ones(2, np.int64), np.ones(2, np.int64), 64, 0, 1000)
    with pytest.raises(UsageError, match="2 pages have sources, and 3 have lengths"):
        Hits([MEMORY], np.zeros(2, np.int64), np.ones(3, np.int64), 64, 0, 1000)


def test_the_metrics_name_what_can_be_decided() -> None:
    assert {choice.value for choice in Choice} == set(FETCH_CHOICES)
    assert {reason.value for reason in Reason} == set(FETCH_REASONS)
