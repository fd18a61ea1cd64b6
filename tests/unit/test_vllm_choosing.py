"""How much of a prefix vLLM fetches: decided by what fetching and computing took, as its scheduler sees them."""

from __future__ import annotations

import numpy as np
import pytest

from p2pkv.errors import ConfigError
from p2pkv.integrations.vllm_connector.choosing import Choosing
from p2pkv.integrations.vllm_connector.prefixes import Found
from p2pkv.integrations.vllm_connector.stats import Tally
from p2pkv.metrics import Metrics
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.policy import Policy
from p2pkv.recompute.rates import Source
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake
from vllm_instances import Open, load_prefix, tokens

PAGES, PAGE_S = 20, 0.010
OWNER = Source(1)


class Scheduler:
    """What vLLM's scheduler tells of requests, in a time of its own."""

    def __init__(self, kind: str = "measured") -> None:
        self.now = 0.0
        self.metrics = Metrics()
        self.choosing = Choosing(
            Policy(kind, self.metrics, clock=lambda: self.now), Tally(), clock=lambda: self.now
        )
        self.requests: dict[str, RequestFake] = {}

    def run(
        self, *, fetch_s: float = 0.0, has_failed: bool = False, name: str = "r"
    ) -> tuple[int, float | None]:
        """Run a prompt of which others have all but the end; return how many blocks were fetched, and the limit."""
        request = RequestFake(name, list(range(PAGES * BLOCK + 2)), None)
        self.requests[name] = request
        n_tokens = PAGES * BLOCK
        hits = Hits([OWNER], np.zeros(PAGES, np.int64), np.full(PAGES, 1 << 16), BLOCK, 0, request.num_tokens)
        n = self.choosing.end(name, Found(n_tokens, hits)) // BLOCK
        ids = list(range(n))
        limit = self.choosing.began(name, ids)
        if n:
            self.now += fetch_s
            self.choosing.loaded([name], set(ids) if has_failed else set())
        request.num_computed_tokens = 0 if has_failed else n * BLOCK
        self.choosing.scheduled([name], self.requests)
        n_left = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens = request.num_prompt_tokens  # so vLLM counts what it has only scheduled
        self.choosing.look()
        self.now += PAGE_S * n_left / BLOCK
        request.n_output = 1
        self.choosing.look()
        self.choosing.finished(request)
        return n, limit

    def seconds(self, figure: str) -> float:
        return float(self.metrics.recompute_seconds.labels(figure).value)


def test_a_slow_owner_is_asked_for_little_and_a_quick_one_for_all() -> None:
    slow, quick = Scheduler(), Scheduler()
    for number in range(30):
        slow.run(fetch_s=PAGES * PAGE_S * 5, name=f"r{number}")
        quick.run(fetch_s=PAGES * PAGE_S / 5, name=f"r{number}")
    n_slow = [slow.run(fetch_s=PAGES * PAGE_S * 5, name=f"s{i}")[0] for i in range(10)]
    n_quick = [quick.run(fetch_s=PAGES * PAGE_S / 5, name=f"s{i}")[0] for i in range(10)]
    assert sorted(n_slow)[:8] == [0] * 8, "but for probes"
    assert min(n_quick) >= PAGES - 2
    assert quick.seconds("regret") < 0.1 * quick.seconds("real")


def test_a_fetch_has_as_long_as_computing_would_take_and_a_half() -> None:
    scheduler = Scheduler()
    scheduler.run(fetch_s=0.01)
    n, limit = scheduler.run(fetch_s=0.01, name="second")
    assert n == PAGES
    assert limit == pytest.approx(1.5 * PAGES * PAGE_S, rel=0.2)


def test_what_never_came_is_learnt() -> None:
    scheduler = Scheduler()
    scheduler.run(fetch_s=0.01)
    assert scheduler.run(fetch_s=3.0, has_failed=True, name="lost")[0] == PAGES
    assert scheduler.run(fetch_s=3.0, name="after")[0] < PAGES


def test_what_another_request_computed_meanwhile_is_not_judged() -> None:
    scheduler = Scheduler()
    hits = Hits([OWNER], np.zeros(4, np.int64), np.full(4, 1), BLOCK, 0, 100)
    assert scheduler.choosing.end("r", Found(4 * BLOCK, hits)) == 4 * BLOCK
    assert scheduler.choosing.began("r", [1, 2]) is None
    scheduler.choosing.loaded(["r"], set())
    assert not scheduler.choosing._plans


def test_what_has_ended_is_forgotten() -> None:
    scheduler = Scheduler()
    scheduler.run()
    aborted = RequestFake("aborted", tokens(20), None)
    hits = Hits([OWNER], np.zeros(4, np.int64), np.full(4, 1), BLOCK, 0, 20)
    scheduler.choosing.end("aborted", Found(4 * BLOCK, hits))
    scheduler.choosing.scheduled(["aborted"], {"aborted": aborted})
    scheduler.choosing.finished(aborted)
    preempted = RequestFake("preempted", tokens(20), None)
    scheduler.choosing.scheduled(["preempted"], {"preempted": preempted})
    scheduler.choosing.preempted(["preempted"])
    assert not scheduler.choosing._plans
    assert not scheduler.choosing._prefills
    assert not scheduler.choosing.policy._busy_until


def published(engine: EngineFake, prompt: list[int]) -> None:
    before = engine.counts.get("prefix_blocks_published", 0)
    engine.run(engine.submit(prompt))
    n = len(prompt) // BLOCK
    engine.step_until(
        lambda: engine.counts.get("prefix_blocks_published", 0) >= before + n and engine.is_idle
    )


@pytest.mark.parametrize("kinds", [("full",), ("full", "window")], ids=" ".join)
def test_an_engine_told_so_fetches_nothing(open_engine: Open, kinds: tuple[str, ...]) -> None:
    first = open_engine(kinds=kinds, n_blocks=512)  # else too many would wait to be published
    second = open_engine({"fetch_prefixes": "never"}, role="kv_consumer", kinds=kinds)
    published(first, tokens(6 * BLOCK))
    request = second.submit([*tokens(6 * BLOCK), 1, 2])
    second.run(request)
    assert request.loaded_tokens == 0
    assert not second.wrong


def test_the_engine_loads_as_many_blocks_as_pay(open_engine: Open) -> None:
    first, second = open_engine(), open_engine({"fetch_prefixes": "measured"}, role="kv_consumer")
    prompt = tokens(6 * BLOCK)
    published(first, prompt)
    choosing = second.scheduler._scheduler._choosing
    assert choosing is not None
    policy = choosing.policy

    # nothing is known yet: all is fetched, and it is seen how long that takes, and the rest
    load_prefix(second, [*prompt, 1, 2], 6 * BLOCK)
    second.step_until(lambda: second.is_idle)
    assert policy._rates._sources
    assert policy._prefill.n_samples == 1

    # the owner is slow from now on, and computing is quick
    (owner,) = policy._rates._sources
    for _ in range(20):
        policy._rates.add(owner, 6 * 3 * 512, 1000.0, has_failed=False)
        policy.computed(0, 6 * BLOCK, 1e-3)
    request = second.submit([*prompt, 3, 4])
    second.run(request)
    assert request.loaded_tokens == 0
    assert not second.wrong


def test_an_unknown_way_is_refused(open_engine: Open) -> None:
    with pytest.raises(
        ConfigError, match="fetch_prefixes must be one of always, measured, never, not 'maybe'"
    ):
        open_engine({"fetch_prefixes": "maybe"})
