"""What the router does not do to instances: try again without end, or have decodes compute prompts."""

from __future__ import annotations

import pytest

from front import COMPLETION, run, start, until
from p2pkv.instances.heartbeat import Instance, Mode, Role
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.retry_budget import RetryBudget, pause
from rig import Rig


def test_retries_are_a_share_of_the_requests_and_some_a_second() -> None:
    seconds = [0.0]
    budget = RetryBudget(lambda: seconds[0])
    n_saved = 0
    while budget.take():
        n_saved += 1
    assert n_saved == 1000
    for _ in range(50):
        budget.note_request()
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    seconds[0] = 0.5
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]


def test_the_first_retry_is_made_at_once_and_later_ones_at_times_of_their_own() -> None:
    assert pause(1) == 0.0
    for number in (2, 5, 50):
        pauses = [pause(number) for _ in range(100)]
        assert 0.0 <= min(pauses) < max(pauses) <= 0.25
        assert len(set(pauses)) > 90


def test_instances_that_all_fail_do_not_get_thrice_as_many_requests() -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.BOTH, refusal=(500, b"{}")) for _ in range(3)]
        front = await start(rig, engines)
        assert front.app._serving is not None
        front.app._serving._services.retry_budget._left = -10_000.0
        status, _, _ = await front.post(COMPLETION)
        assert status == 500
        assert sum(len(engine.requests) for engine in engines) == 1
        assert await front.metric("p2pkv_proxy_refused_retries_total") == 1

    run(test)


@pytest.mark.parametrize("mode", [Mode.VLLM, Mode.SGLANG])
def test_with_strict_pd_decodes_compute_no_prompts(mode: Mode) -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL, mode), await rig.engine(Role.DECODE, mode)
        front = await start(rig, [prefill, decode], strict_pd=True)
        assert (await front.post(COMPLETION))[0] == 200
        if mode is Mode.VLLM:
            status, answer, _ = await front.post(COMPLETION | {"n": 2})
            assert (status, "compute no prompts" in answer["error"]["message"]) == (400, True)
        n_before = len(decode.requests)
        tracked = front.app.registry.get(prefill.instance.id)
        assert tracked is not None
        tracked.is_draining_here = True
        assert (await front.post(COMPLETION))[0] == 503
        assert (await front.post({}, "/v1/embeddings"))[0] == 503
        assert len(decode.requests) == n_before
        # an ordinary engine computes them by its nature
        both = await rig.engine(Role.BOTH, mode)
        front.app.registry.list_instance(both.instance)
        await until(lambda: all(t.state.value in ("ready", "draining") for t in front.app.registry))
        if mode is Mode.SGLANG:
            assert (await front.post(COMPLETION))[0] == 200

    run(test)


def test_instances_that_went_are_told_of_with_the_reason() -> None:
    registry = Registry()
    metrics = Metrics(registry)
    instance = Instance(url="http://a:1", role=Role.DECODE, id="a")
    registry.list_instance(instance)
    assert not registry.gone
    registry.unlist("a")
    registry.expire()
    (gone,) = registry.gone.values()
    assert (gone.instance, gone.why) == (instance, "it is no longer listed")
    labels = {"instance": "a", "role": "decode", "reason": gone.why}
    assert metrics.registry.get_sample_value("p2pkv_proxy_gone_instance_timestamp_seconds", labels) == gone.at
    registry.list_instance(instance)
    assert not registry.gone


def test_of_those_that_went_the_last_hundred_are_known() -> None:
    registry = Registry()
    for number in range(150):
        registry.list_instance(Instance(url="http://a:1", role=Role.BOTH, id=f"i{number}"))
        registry.unlist(f"i{number}")
        registry.expire()
    assert list(registry.gone) == [f"i{number}" for number in range(50, 150)]
