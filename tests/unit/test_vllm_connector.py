"""vLLM's connector without vLLM: whole nodes in this process, under vLLM's rules (``vllm_engine.py``)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import eventually
from p2pkv import Node
from p2pkv.errors import ConfigError
from vllm_fakes import BLOCK
from vllm_instances import PREFILL, Open, hand_off, load_prefix, tokens


@pytest.fixture(params=[False, True], ids=["", "attached"])
def attached(request: pytest.FixtureRequest) -> bool:
    """By themselves, and as engines of their host's node."""
    return bool(request.param)


def test_a_prefix_published_by_one_instance_is_loaded_by_another(open_engine: Open) -> None:
    first, second = open_engine({"share_prefixes": True}), open_engine(role="kv_consumer")
    shared = tokens(6 * BLOCK)
    first.run(first.submit([*shared, 7, 8, 9]))
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 6 and first.is_idle)

    request = load_prefix(second, [*shared, 1, 2], 6 * BLOCK)
    assert second.is_right(request, 6)
    assert second.counts["prefix_blocks_loaded"] >= 6

    load_prefix(second, shared, 5 * BLOCK)  # never the last token: it has to be computed
    unknown = second.submit([99, *shared])
    second.run(unknown)
    assert unknown.loaded_tokens == 0


def test_two_instances_go_on_from_each_others_prefixes(open_engine: Open) -> None:
    one, other = open_engine(n_blocks=128), open_engine(n_blocks=128)
    ours, theirs = tokens(6 * BLOCK, seed=1), tokens(6 * BLOCK, seed=2)
    for engine, prompt in ((one, ours), (other, theirs)):
        engine.run(engine.submit(prompt))
        engine.step_until(lambda engine=engine: engine.counts.get("prefix_blocks_published") == 6)  # type: ignore[misc]

    # each goes on from what the other has, and publishes what it has added
    for engine, prompt in ((one, theirs), (other, ours)):
        before = engine.counts["prefix_blocks_published"]
        request = load_prefix(engine, [*prompt, *tokens(4 * BLOCK, seed=3)], 6 * BLOCK)
        assert engine.is_right(request, 6)
        engine.run(request)
        engine.step_until(lambda e=engine, n=before: e.counts["prefix_blocks_published"] >= n + 4)  # type: ignore[misc]

    for engine, prompt in ((one, ours), (other, theirs)):
        request = load_prefix(engine, [*prompt, *tokens(4 * BLOCK, seed=3), 7], 10 * BLOCK)
        assert engine.is_right(request, 10)
        engine.run(request)
        engine.step_until(lambda engine=engine: engine.is_idle)  # type: ignore[misc]
        assert not engine.wrong


def test_a_policy_that_fails_requests_reads_no_prefixes(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = open_engine(), open_engine(policy="fail")
    assert "set kv_load_failure_policy to 'recompute'" in caplog.text
    first.run(first.submit(tokens(20)))
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 5)
    request = second.submit(tokens(20))
    second.run(request)
    assert request.loaded_tokens == 0


class SlowToPublish(Node):
    """A node whose publishing waits until it may go on; what it then publishes is what lies there then."""

    may_publish = threading.Event()
    has_begun = threading.Event()

    def publish(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self.may_publish.wait(60.0)
        return super().publish(*args, **kwargs)


@pytest.fixture
def slow() -> Iterator[type[SlowToPublish]]:
    SlowToPublish.may_publish.clear()
    SlowToPublish.has_begun.clear()
    yield SlowToPublish
    SlowToPublish.may_publish.set()


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_blocks_are_kept_until_they_are_published(
    open_engine: Open, slow: type[SlowToPublish], *, keeps_blocks: bool
) -> None:
    first = open_engine(role="kv_producer", keeps_blocks=keeps_blocks, start_node=slow.start)
    second = open_engine(role="kv_consumer")
    request = first.submit(tokens(4 * BLOCK))
    first.step()
    slow.has_begun.wait(60.0)
    kept = [i for i in request.block_ids if i not in first.free]
    assert len(kept) == (4 if keeps_blocks else 0)
    if not keeps_blocks:  # other KV goes out under the first one's name
        first.overwrite(request.block_ids)
    slow.may_publish.set()
    eventually(lambda: first.node.counters().get("p2pkv_published_pages_total", 0) >= 4, 10.0)
    wanted = load_prefix(second, [*tokens(4 * BLOCK), 5], 4 * BLOCK)
    assert second.is_right(wanted, 4) == keeps_blocks


def test_an_error_at_the_end_of_a_request_frees_nothing_too_early(
    open_engine: Open, slow: type[SlowToPublish]
) -> None:
    """Whatever can't be handed off: its blocks are still being published."""
    first = open_engine(role="kv_producer", start_node=slow.start)
    request = first.submit(tokens(4 * BLOCK), PREFILL)
    request.mm_features = [object()]  # of no kind that the connector knows
    first.step()
    slow.has_begun.wait(60.0)
    assert request.answer is None
    assert not set(request.block_ids) & set(first.free)
    slow.may_publish.set()
    first.step_until(lambda: first.is_idle)
    assert sorted(first.free) == list(range(1, 64))


def test_a_preempted_requests_blocks_are_kept_until_they_are_published(
    open_engine: Open, slow: type[SlowToPublish]
) -> None:
    first = open_engine(role="kv_producer", start_node=slow.start)
    second = open_engine(role="kv_consumer")
    victim = first.submit(tokens(3 * BLOCK))
    victim.runs_on = True
    first.step()
    slow.has_begun.wait(60.0)
    held = victim.block_ids
    first.preempt(victim)
    first.step()
    assert not set(held) & set(first.free)
    slow.may_publish.set()
    first.step_until(lambda: not first.scheduler.has_pending_push_work())
    assert set(held) <= set(first.free)
    wanted = load_prefix(second, [*tokens(3 * BLOCK), 5], 3 * BLOCK)
    assert second.is_right(wanted, 3)


class Broken(Node):
    """A node that starts, and all of whose calls end in a bug."""

    @property
    def transfers(self) -> Any:
        return SimpleNamespace(set_view=lambda old, new: None)

    def publish(self, *_: object, **__: object) -> Any:
        raise ZeroDivisionError("in publish")

    fetch = exists = clear = publish  # type: ignore[assignment]


def test_nothing_raises_into_the_engine(open_engine: Open) -> None:
    prefill, broken = open_engine(), open_engine(start_node=Broken)
    good = prefill.submit(tokens(20))
    prefill.run(good)
    given = hand_off(prefill, tokens(21))
    for request in (
        broken.submit(tokens(20)),
        broken.submit(tokens(21), given),
        broken.submit(tokens(22), PREFILL),
    ):
        broken.run(request)
    broken.scheduler.reset_cache()
    broken.step_until(lambda: broken.is_idle)
    assert sorted(broken.free) == list(range(1, 64))
    assert broken.counts["handoffs_failed"] == 1
    assert broken.counts["prefix_blocks_unpublished"] > 0


def test_a_prompt_that_is_most_of_a_small_cache_is_shared(open_engine: Open) -> None:
    engine = open_engine(n_blocks=16)
    engine.run(engine.submit(tokens(20)))
    engine.step_until(lambda: engine.counts.get("prefix_blocks_published") == 5)
    assert engine.counts.get("prefix_blocks_unpublished", 0) == 0


def test_weights_that_change_take_back_what_was_published(open_engine: Open, *, attached: bool) -> None:
    engine = open_engine()
    engine.run(engine.submit(tokens(20)))
    engine.step_until(lambda: engine.counts.get("prefix_blocks_published") == 5)
    assert engine.scheduler.reset_cache()
    assert engine.scheduler.has_pending_push_work()
    engine.step()
    assert not engine.scheduler.has_pending_push_work()
    if not attached:  # there they are left to age
        assert engine.node.counters()["p2pkv_pool_pages"] == 0
    again = engine.run(engine.submit(tokens(20)))
    assert again.loaded_tokens == 0


def test_an_adapter_of_the_same_name_from_elsewhere_is_another(open_engine: Open) -> None:
    prefill, decode = open_engine(role="kv_producer"), open_engine(role="kv_consumer")
    for path, n_loaded in (("/adapters/a", 10), ("/adapters/b", 0)):
        computed = prefill.submit(tokens(10), PREFILL)
        computed.lora_request = SimpleNamespace(lora_name="style", lora_path="/adapters/a")
        prefill.run(computed)
        prefill.step()
        request = decode.submit(tokens(10))
        del decode.requests[request.request_id]
        request.kv_transfer_params = copy.deepcopy(computed.answer)
        request.lora_request = SimpleNamespace(lora_name="style", lora_path=path)
        decode.requests[request.request_id] = request
        decode.scheduler.on_new_request(request)
        decode.run(request)
        assert request.loaded_tokens == n_loaded, path


def test_an_unknown_setting_is_refused_with_the_nearest(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match="did you mean 'pool_size'"):
        open_engine({"pool_sise": "1MiB"})
