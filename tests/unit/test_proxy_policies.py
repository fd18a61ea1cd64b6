"""The router's policies: what every one promises, and what each one is for."""

from __future__ import annotations

import time

import pytest

from p2pkv.instances.heartbeat import Instance, Load, Role, State
from p2pkv_proxy.costs import Costs, Work
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.page_keys import Keying
from p2pkv_proxy.policies import POLICIES, Policy
from p2pkv_proxy.policies.predicted import Predicted
from p2pkv_proxy.policies.prefix import Prefix
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.tracked import Tracked


def prompt(text: str, *, holdings: Held | None = None, max_tokens: int = 1) -> Prompt:
    asked = Prompt("", [text], None, is_stream=True, max_tokens=max_tokens, n_tokens=len(text) // 4)
    asked.holdings = holdings
    return asked


def test_what_is_held_adds_up_over_owners_and_tiers_and_ends_at_the_first_gap() -> None:
    places = [Place("a"), Place("b"), Place("a", is_on_disk=True), None, Place("c")]
    held = Held.of(places, 16)
    assert (held.total, held.at("a"), held.at("b"), held.at("c")) == (48, 32, 16, 0)
    assert prompt("x" * 400, holdings=held).n_to_compute == 52
    assert prompt("x" * 400).n_to_compute == 100


def tracked_ones(*names: str) -> list[Tracked]:
    costs = Costs()
    instances = [Instance(url="http://a:1", role=Role.PREFILL, id=name, node_id=name) for name in names]
    return [Tracked(instance, is_listed=True, costs=costs) for instance in instances]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


PROMPTS = [
    prompt(""),
    prompt("x" * 10_000),
    prompt("x" * 10_000, holdings=Held()),
    prompt("x" * 10_000, holdings=Held({Place("b"): 1000, Place("nobody known", is_on_disk=True): 1000})),
]


@pytest.mark.parametrize("asked", PROMPTS, ids=["empty", "not known", "held by nobody", "held"])
def test_every_policy_takes_one_of_those_offered_and_says_why(policy: Policy, asked: Prompt) -> None:
    ones = tracked_ones("a", "b", "c")
    for _ in range(20):
        choice = policy.choose(asked, ones)
        assert choice.tracked in ones
        assert choice.reason.isidentifier()
    assert policy.choose(asked, ones[1:2]).tracked is ones[1]


def test_every_policy_forgets_who_is_gone_and_takes_who_comes(policy: Policy) -> None:
    ones = tracked_ones("a", "b", "c")
    for _ in range(10):
        policy.choose(PROMPTS[1], ones)
    for gone in ("a", "b", "nobody"):
        policy.forget(gone)
    newcomers = tracked_ones("d", "e")
    assert {policy.choose(PROMPTS[1], newcomers).tracked.id for _ in range(20)} <= {"d", "e"}


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("random", "round_robin")])
def test_a_policy_that_weighs_leaves_one_alone_that_has_far_too_much_to_do(name: str) -> None:
    policy = POLICIES[name]()
    ones = tracked_ones("a", "b", "c")
    asked = prompt("x" * 10_000, holdings=Held({Place("a"): 2000}))
    first = policy.choose(asked, ones).tracked
    for _ in range(20):
        first.begin(100_000, 0.0, lambda: None, work=Work(1, 100_000))
    assert first not in {policy.choose(asked, ones).tracked for _ in range(20)}


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("random", "round_robin")])
def test_a_policy_that_weighs_leaves_one_alone_that_has_just_failed(name: str) -> None:
    policy, ones, now = POLICIES[name](), tracked_ones("a", "b", "c"), time.monotonic()
    asked = prompt("x" * 2000, holdings=Held({Place("a"): 400}))
    first = policy.choose(asked, ones).tracked
    for _ in range(2):  # a third one in a row would open its breaker
        attempt = first.begin(500, now, lambda: None)
        first.end(attempt, now, failed=True)
    assert first not in {policy.choose(asked, ones).tracked for _ in range(20)}


def test_predicted_weighs_queue_rate_and_what_is_to_be_fetched() -> None:
    ones = tracked_ones("a", "b")
    costs = ones[0].costs
    costs.compute_s |= {"a": 0.001, "b": 0.001}
    costs.fetch_s[Place("a")] = costs.fetch_s[Place("b")] = 0.0005
    policy = Predicted(now=lambda: 0.0)
    asked = prompt("x" * 4000, holdings=Held({Place("b"): 800}))
    assert policy.choose(asked, ones).tracked.id == "b"
    ones[1].begin(
        1000, 0.0, lambda: None, work=Work(1, 1000)
    )  # a second's work: more than the fetch of 800 tokens
    choice = policy.choose(asked, ones)
    assert (choice.tracked.id, choice.reason) == ("a", "soonest")
    assert "800 to fetch" in choice.detail
    costs.compute_s["a"] = 0.01  # 200 tokens would take it two seconds
    assert policy.choose(asked, ones).tracked.id == "b"
    costs.compute_s["a"], costs.fetch_s[Place("b")] = 0.001, 0.01  # so would 800 over that link
    assert policy.choose(asked, ones).tracked.id == "b"


def test_predicted_counts_what_the_head_of_a_queue_has_done() -> None:
    ones = tracked_ones("a", "b")
    ones[0].costs.compute_s |= {"a": 0.001, "b": 0.001}
    ones[0].begin(1000, 0.0, lambda: None, work=Work(1, 1000))
    ones[1].begin(600, 0.5, lambda: None, work=Work(1, 600))
    now = 0.5
    policy = Predicted(now=lambda: now)
    assert policy.choose(prompt("x" * 400, holdings=Held()), ones).tracked.id == "a"


def test_predicted_without_a_directory_goes_where_the_beginning_was_sent() -> None:
    ones = tracked_ones("a", "b", "c")
    policy = Predicted(now=lambda: 0.0)
    first = policy.choose(prompt("a beginning " * 500), ones)
    assert first.reason == "guessed"
    assert {policy.choose(prompt("a beginning " * 500 + str(i)), ones).tracked for i in range(20)} == {
        first.tracked
    }


@pytest.mark.parametrize("name", ["consistent_hash", "session"])
def test_a_key_stays_with_its_instance_whoever_comes_and_goes(name: str) -> None:
    ones = tracked_ones("a", "b", "c", "d")
    asked = [prompt(f"{number:4}" * 1000) for number in range(50)]
    first = [POLICIES[name]().choose(one, ones).tracked.id for one in asked]
    assert len(set(first)) == 4
    without = [POLICIES[name]().choose(one, ones[1:]).tracked.id for one in asked]
    assert all(now == before for before, now in zip(first, without, strict=True) if before != "a")


def test_a_session_stays_together_whatever_its_prompts() -> None:
    ones, policy = tracked_ones("a", "b", "c", "d"), POLICIES["session"]()
    chosen = set()
    for number in range(20):
        asked = prompt(f"{number:4}" * 1000)
        asked.session = "one of many"
        chosen.add(policy.choose(asked, ones).tracked.id)
    assert len(chosen) == 1


def test_kv_space_takes_the_emptiest_that_has_room_by_what_is_really_held() -> None:
    ones, policy = tracked_ones("a", "b", "c"), POLICIES["kv_space"]()
    assert policy.choose(prompt("x" * 400), ones).reason == "load"  # they don't say
    for one, held, capacity in zip(ones, (500, 50, 900), (1000, 120, 10_000), strict=True):
        one.load = Load(State.READY, kv_tokens=held, kv_capacity=capacity)
    ones[2].begin(100_000, 0.0, lambda: None)  # max_tokens that nobody will see
    assert policy.choose(prompt("x" * 400), ones).tracked.id == "c"
    ones[2].begin(1, 0.0, lambda: None, n_prompt=9000)  # sent since, and on its way to its memory
    choice = policy.choose(prompt("x" * 400), ones)
    assert (choice.tracked.id, choice.reason) == (
        "a",
        "space",
    )  # b is emptier, and has no room for 100 tokens
    assert policy.choose(prompt("x" * 40_000), ones).reason == "full"


def test_predicted_does_not_take_one_that_stands_still_for_one_without_work() -> None:
    ones = tracked_ones("a", "b")
    ones[0].costs.compute_s |= {"a": 0.001, "b": 0.001}
    ones[0].begin(100, 0.0, lambda: None, work=Work(1, 100))
    ones[1].begin(500, 2.0, lambda: None, work=Work(1, 500))
    policy = Predicted(now=lambda: 2.0)  # the prompt at "a" should have been done long ago
    assert policy.choose(prompt("x" * 400, holdings=Held()), ones).tracked.id == "b"


def test_round_robin_goes_on_behind_the_last_whoever_comes_and_goes() -> None:
    ones = tracked_ones("a", "b", "c")
    policy = POLICIES["round_robin"]()
    order = [
        policy.choose(prompt(""), offered).tracked.id for offered in (ones, ones[:1] + ones[2:], ones, ones)
    ]
    assert order == ["a", "c", "a", "b"]


def test_least_loaded_counts_tokens() -> None:
    ones = tracked_ones("a", "b")
    ones[0].begin(1000, 0.0, lambda: None)
    for _ in range(3):
        ones[1].begin(10, 0.0, lambda: None)
    assert POLICIES["least_loaded"]().choose(prompt(""), ones).tracked.id == "b"


def test_power_of_two_never_takes_the_heaviest_and_takes_all_others() -> None:
    ones = tracked_ones("a", "b", "c")
    ones[1].begin(1000, 0.0, lambda: None)
    policy = POLICIES["power_of_two"]()
    assert {policy.choose(prompt(""), ones).tracked.id for _ in range(200)} == {"a", "c"}


def test_prefix_stays_with_who_was_sent_the_beginning_until_it_has_too_much_to_do() -> None:
    ones = tracked_ones("a", "b")
    policy = Prefix()
    first = policy.choose(prompt("a beginning " * 50), ones).tracked
    choice = policy.choose(prompt("a beginning " * 50 + "and more"), ones)
    assert (choice.tracked, choice.reason) == (first, "prefix")
    first.begin(100_000, 0.0, lambda: None)
    assert policy.choose(prompt("a beginning " * 50), ones).tracked is not first


def test_prefix_forgets_the_longest_unused_and_who_is_gone() -> None:
    ones = tracked_ones("a")
    policy = Prefix(most_blocks=10)
    for number in range(20):
        policy.choose(prompt(f"{number:4}" * 100), ones)
    assert policy.choose(prompt(f"{19:4}" * 100), ones).reason == "prefix"
    assert policy.choose(prompt(f"{0:4}" * 100), ones).reason == "load"
    policy.forget("a")
    assert policy.choose(prompt(f"{0:4}" * 100), ones).reason == "load"


def test_cache_aware_weighs_what_is_held_against_what_is_to_do() -> None:
    ones = tracked_ones("a", "b")
    policy = POLICIES["cache_aware"]()
    asked = prompt("x" * 4000)
    assert policy.choose(asked, ones).reason == "fallback"
    asked.holdings = Held({Place("b"): 500, Place("b", is_on_disk=True): 300, Place("a"): 100})
    choice = policy.choose(asked, ones)
    assert (choice.tracked.id, choice.reason) == ("b", "cache")
    ones[1].begin(5000, 0.0, lambda: None)
    assert policy.choose(asked, ones).tracked.id == "a"


def test_page_keys_are_those_of_the_demos_engine() -> None:
    from demo.model import PAGE, encode
    from demo.paged_kv import page_keys

    keying = Keying("any", PAGE, "bytes", "")
    tokens = keying.tokens("some text that has a page or two of bytes: ä")
    assert tokens is not None
    assert tokens == encode("some text that has a page or two of bytes: ä".encode())
    assert keying.keys(tokens) == page_keys(tokens, PAGE)
    assert Keying("any", PAGE, "", "").tokens("text") is None
