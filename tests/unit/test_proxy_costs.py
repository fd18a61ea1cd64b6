"""What the router learns of how long prompts take: from their times alone, and no more than can be true."""

from __future__ import annotations

import random
import time

import pytest

from p2pkv.instances.heartbeat import Instance, Role
from p2pkv_proxy.costs import OWN, Costs, Work, work_of
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.tracked import Tracked

NEAR, FAR, DISK = Place("near"), Place("far"), Place("near", is_on_disk=True)
TRUE_S = {"fast": 1 / 20_000, "slow": 1 / 2_000, NEAR: 1 / 400_000, FAR: 1 / 10_000, DISK: 1 / 50_000}


def true_seconds(name: str, work: Work) -> float:
    return 0.003 + work.n_compute * TRUE_S[name] + sum(n * TRUE_S[place] for place, n in work.fetched.items())


def test_slow_instances_and_slow_links_are_told_apart() -> None:
    costs, chooser = Costs(), random.Random(1)
    for _ in range(3000):
        places = chooser.sample([NEAR, FAR, DISK], chooser.randrange(4))
        fetched = {place: float(chooser.randrange(100, 20_000)) for place in places}
        name, work = chooser.choice(["fast", "slow"]), Work(1, chooser.randrange(1, 20_000), fetched)
        costs.observe(name, work, true_seconds(name, work) * chooser.uniform(0.8, 1.2))
    for name in ("fast", "slow"):
        assert costs.compute(name) == pytest.approx(TRUE_S[name], rel=0.25)
    assert costs.fetch(FAR) == pytest.approx(TRUE_S[FAR], rel=0.35)
    assert costs.fetch(DISK) < costs.fetch(FAR) / 2


def test_one_that_answers_at_once_or_never_is_believed_within_bounds() -> None:
    costs = Costs()
    for seconds in (0.0, 1e9):
        for _ in range(1000):
            costs.observe("a", Work(1, 1000, {NEAR: 1000}), seconds)
        assert 0.0 < costs.compute("a") <= 1.0
        assert 0.0 < costs.fetch(NEAR) <= 1.0
    costs.forget("a")
    assert not costs.compute_s


def test_an_instance_that_was_slow_once_is_not_taken_for_slow_for_ever() -> None:
    costs = Costs()
    for _ in range(50):
        for name in ("a", "b"):
            costs.observe(name, Work(1, 1000), 0.1)
    for _ in range(20):
        costs.observe("a", Work(1, 1000), 5.0)  # it stood still
        costs.observe("b", Work(1, 1000), 0.1)
    assert costs.compute("a") > 2 * costs.compute("b")
    for _ in range(9):  # nobody goes to it any more
        costs.observe("b", Work(1, 1000), 0.1)
    assert costs.compute("a") == costs.compute("newcomer")
    for _ in range(20):
        costs.observe("a", Work(1, 1000), 0.1)
        costs.observe("b", Work(1, 1000), 0.1)
    assert costs.compute("a") == pytest.approx(0.0001, rel=0.15)


def run_turns(n_at_once: int, rate: float) -> Tracked:
    """Have an instance compute prompts in the order they came, with ``n_at_once`` of them there all the time."""
    registry = Registry()
    tracked = Tracked(
        Instance(url="http://a:1", role=Role.PREFILL, id="a"), is_listed=True, costs=registry.costs
    )
    chooser, now, waiting = random.Random(2), 0.0, []
    for _ in range(400):
        while len(waiting) < n_at_once:
            work = Work(1, chooser.randrange(100, 10_000))
            waiting.append(tracked.begin(int(work.n_compute), now, lambda: None, work=work))
        head = waiting.pop(0)
        assert head.work is not None
        now += head.work.n_compute / rate
        tracked.answered(head, now)
        tracked.completed(head, now)
        tracked.end(head, now)
    return tracked


@pytest.mark.parametrize("n_at_once", [1, 5])
def test_a_rate_is_learnt_whether_prompts_wait_or_not(n_at_once: int) -> None:
    tracked = run_turns(n_at_once, rate=3000.0)
    assert tracked.costs.compute("a") == pytest.approx(1 / 3000, rel=0.1)


def test_what_ends_without_an_answer_teaches_nothing_and_leaves_nothing_queued() -> None:
    tracked = run_turns(1, rate=3000.0)
    learnt = tracked.costs.compute("a")
    attempts = [tracked.begin(1000, 1e4, lambda: None, work=Work(1, 1000)) for _ in range(20)]
    assert tracked.queued(1e4) == pytest.approx(20 * tracked.costs.seconds("a", Work(1, 1000)))
    for number, attempt in enumerate(attempts):
        tracked.end(attempt, 2e4, failed=bool(number % 2))
    assert tracked.queued(2e4) == 0.0
    assert tracked.costs.compute("a") == learnt


def test_an_own_page_is_not_fetched_unless_it_is_on_disk() -> None:
    asked = Prompt("", ["x"], None, is_stream=True, max_tokens=1, n_tokens=100)
    asked.holdings = Held({NEAR: 30, DISK: 20, FAR: 10})
    assert work_of(asked, "i", "near") == Work(1, 40, {OWN: 30, DISK: 20, FAR: 10})
    asked.holdings = Held({NEAR: 100})
    assert work_of(asked, "i", "near").n_compute == 1


def test_what_waits_and_for_how_long_is_told_for_autoscalers() -> None:
    registry = Registry(now=lambda: 0.0)
    metrics = Metrics(registry)
    registry.list_instance(Instance(url="http://a:1", role=Role.PREFILL, id="a"))
    (tracked,) = registry
    registry.costs.compute_s["a"] = 0.001

    def told(what: str) -> float:
        name = f"p2pkv_proxy_instance_{what}"
        return metrics.registry.get_sample_value(name, {"instance": "a", "role": "prefill"}) or 0.0

    assert (told("waiting_requests"), told("queue_seconds")) == (0, 0)
    now = time.monotonic()
    attempts = [tracked.begin(60_000, now, lambda: None, work=Work(1, 60_000)) for _ in range(3)]
    assert told("waiting_requests") == 3
    assert told("queue_seconds") == pytest.approx(180.0, rel=0.1)
    tracked.answered(attempts[0], now)
    assert (told("requests"), told("waiting_requests")) == (3, 2)
    assert told("queue_seconds") == pytest.approx(120.0, rel=0.1)
    registry.note_elsewhere({"a": (5, 100_000)})  # each worker tells its own, and they are added up
    assert told("queue_seconds") == pytest.approx(120.0, rel=0.1)
    for attempt in attempts:
        tracked.end(attempt, now)
    assert (told("waiting_requests"), told("queue_seconds")) == (0, 0)
