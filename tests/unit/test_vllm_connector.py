"""vLLM's connector without vLLM: whole nodes in this process, under vLLM's rules (``vllm_fakes.py``)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster import eventually, free_port
from p2pkv import Config, Node
from p2pkv.errors import ConfigError
from p2pkv.testing.lateness import returns_within
from p2pkv.transfers import RowStatus
from vllm_fakes import (
    BLOCK,
    EngineFake,
    RequestFake,
)

Open = Callable[..., EngineFake]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """Open instances of one cluster: ``open(settings={...}, role=..., policy=...)``."""
    join = f"127.0.0.1:{free_port()}"
    opened: list[EngineFake] = []

    def open_one(settings: dict[str, Any] | None = None, **options: Any) -> EngineFake:
        base = {
            "join": join,
            "pool_size": "1MiB",
            "node_id": f"node{len(opened)}",
            "load_deadline": 5.0,
            "deadline": 5.0,
        }
        opened.append(EngineFake(base | (settings or {}), **options))
        nodes = [node for engine in opened for node in engine.nodes]
        eventually(lambda: all(len(node.members()) == len(nodes) for node in nodes), 20.0)
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def pair(open_engine: Open) -> tuple[EngineFake, EngineFake]:
    """A prefill and a decode instance."""
    return open_engine(role="kv_producer"), open_engine(role="kv_consumer")


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(n)]


def hand_off(prefill: EngineFake, prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt for another instance; its blocks are kept from now on."""
    answer = prefill.run(prefill.submit(prompt, PREFILL)).answer
    assert answer is not None
    prefill.step()  # a worker hears of it with the next step, which vLLM takes at once
    return copy.deepcopy(answer)


def load(decode: EngineFake, prompt: list[int], given: dict[str, Any], *, n_local: int = 0) -> RequestFake:
    """Start a decode request and step until its blocks are there, or are known not to come."""
    request = decode.submit(prompt, given, n_local=n_local)
    decode.step()
    decode.step_until(lambda: request.state != "loading")
    return request


def test_blocks_arrive_byte_for_byte_and_are_freed(pair: tuple[EngineFake, EngineFake]) -> None:
    prefill, decode = pair
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3]
    for seed, n in enumerate(lengths):
        given = hand_off(prefill, tokens(n, seed))
        n_free = len(prefill.free)
        request = load(decode, tokens(n, seed), given)
        assert request.loaded_tokens == n
        assert decode.is_right(request)
        decode.run(request)
        prefill.step_until(lambda: not prefill.requests)
        assert len(prefill.free) > n_free
    assert prefill.counts["handoffs_offered"] == prefill.counts["handoffs_taken"] == len(lengths)
    assert decode.counts["handoffs_loaded"] == len(lengths)
    assert decode.counts["handoff_blocks"] == sum(-(-n // BLOCK) for n in lengths)
    assert "handoffs_failed" not in decode.counts


def test_what_decode_has_already_is_not_loaded(pair: tuple[EngineFake, EngineFake]) -> None:
    prefill, decode = pair
    prompt = tokens(4 * BLOCK + 2)
    request = load(decode, prompt, hand_off(prefill, prompt), n_local=2 * BLOCK)
    assert request.loaded_tokens == 2 * BLOCK + 2
    assert decode.is_right(request)
    assert decode.counts["handoff_blocks"] == 3
    prefill.step_until(lambda: not prefill.requests)


def test_a_request_of_more_rows_than_an_offer_holds_is_several(open_engine: Open) -> None:
    layers = {"n_layers": 8192, "n_blocks": 16}  # four blocks an offer
    prefill, decode = open_engine(role="kv_producer", **layers), open_engine(role="kv_consumer", **layers)
    for seed, n_local in enumerate([0, 4 * BLOCK]):
        prompt = tokens(4 * BLOCK + 1, seed)
        request = load(decode, prompt, hand_off(prefill, prompt), n_local=n_local)
        assert request.loaded_tokens == len(prompt) - n_local
        assert decode.is_right(request)
        decode.run(request)
        prefill.step_until(lambda: not prefill.requests)
    assert prefill.counts["handoffs_taken"] == decode.counts["handoffs_loaded"] == 2


def test_prefill_frees_what_decode_needs_nothing_of(pair: tuple[EngineFake, EngineFake]) -> None:
    prefill, decode = pair
    whole = tokens(2 * BLOCK, seed=1)
    decode.run(decode.submit(whole, hand_off(prefill, whole), n_local=2 * BLOCK))
    never_scheduled = decode.submit([0], hand_off(prefill, tokens(9, seed=2)))  # as vLLM does after an error
    decode.abort(never_scheduled)
    decode.step()
    prefill.step_until(lambda: not prefill.requests)
    assert prefill.counts["handoffs_taken"] == 2


def test_a_request_aborted_while_it_loads_frees_its_blocks_once(pair: tuple[EngineFake, EngineFake]) -> None:
    prefill, decode = pair
    n_free = len(decode.free)
    request = decode.submit(tokens(30), hand_off(prefill, tokens(30)))
    decode.step()
    decode.abort(request)
    decode.step_until(lambda: not decode.requests)
    assert sorted(decode.free) == sorted(range(n_free))


def test_a_request_that_is_aborted_has_its_load_revoked(open_engine: Open) -> None:
    """Its rows may come as late as they like: nobody waits for them, and nothing writes to its blocks any more."""
    prefill = open_engine(role="kv_producer")
    decode = open_engine({"load_deadline": 600.0}, role="kv_consumer")
    never = changed(hand_off(prefill, tokens(20)), name="made up")
    request = decode.submit(tokens(20), never)
    decode.step_until(lambda: request.state == "loading")
    loads = decode.worker._worker._loads._loads
    decode.step_until(lambda: all(started.done() for _, started in loads))
    blocks = list(request.block_ids)
    decode.abort(request)
    assert not set(blocks) & set(decode.free)
    decode.step_until(lambda: not decode.requests)
    assert sorted(decode.free) == list(range(64))
    decode.overwrite(blocks)
    assert "handoffs_loaded" not in decode.counts


def load_prefix(engine: EngineFake, prompt: list[int], n_tokens: int) -> RequestFake:
    """Run a prompt until a look-up found all the prefix: on busy cores some come too late, and find less."""
    for _ in range(10):
        request = engine.submit(prompt)
        engine.step_until(lambda request=request: request.state in ("loading", "finished"))  # type: ignore[misc]
        engine.step_until(lambda request=request: request.state != "loading")  # type: ignore[misc]
        if request.loaded_tokens == n_tokens:
            return request
        engine.run(request)
    raise AssertionError(f"no request loaded {n_tokens} tokens")


def changed(given: dict[str, Any], **fields: object) -> dict[str, Any]:
    given["p2pkv"].update(fields)
    return given


def of_rank(given: dict[str, Any], **fields: str) -> dict[str, Any]:
    """Return a hand-off whose only rank is another: ``node_id``, ``boot`` or ``layout``."""
    named = dict(zip(("node_id", "boot", "layout"), given["p2pkv"]["ranks"][0], strict=True))
    return changed(given, ranks=[list((named | fields).values())])


DAMAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "an earlier boot": lambda given: of_rank(given, boot="1"),
    "a rank of other layers": lambda given: of_rank(given, layout="2 layers"),
    "no such offer": lambda given: changed(given, name="made up"),
    "another prompt": lambda given: changed(given, prompt="0" * 32),
    "fewer tokens than handed off": lambda given: changed(given, n_tokens=1000),
    "another dtype": lambda given: changed(
        given, fingerprint=given["p2pkv"]["fingerprint"] | {"dtype": "bf16"}
    ),
    "no fingerprint": lambda given: changed(given, fingerprint={}),
    "too few ranks": lambda given: changed(given, ranks=[]),
    "a version of the past": lambda given: changed(given, version=1),
    "a version of the future": lambda given: changed(given, version=3),
    "malformed": lambda given: changed(given, ranks=[["a", "b", "c"]]),
    "another connector's": lambda given: {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]},
}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_every_load_that_fails_is_reported_and_by_policy(open_engine: Open, policy: str) -> None:
    prefill = open_engine(role="kv_producer")
    decode = open_engine({"load_deadline": 0.3}, role="kv_consumer", policy=policy)
    for seed, damage in enumerate(DAMAGES.values()):
        prompt = tokens(3 * BLOCK + 1, seed)
        request = decode.submit(prompt, damage(hand_off(prefill, prompt)))
        decode.run(request)
        assert (request.request_id in decode.errors) == (policy == "fail")
    assert decode.counts["handoffs_failed"] == len(DAMAGES)
    assert "handoffs_loaded" not in decode.counts
    assert sorted(decode.free) == list(range(64))

    for seed in range(
        99, 109
    ):  # and one that is whole comes through; on busy cores not always within the deadline
        prompt = tokens(20, seed)
        request = load(decode, prompt, hand_off(prefill, prompt))
        if request.loaded_tokens == 20:
            break
    assert request.loaded_tokens == 20
    assert decode.is_right(request)


def test_a_hand_off_that_was_taken_is_refused_at_once(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = (
        open_engine(role="kv_producer"),
        open_engine({"load_deadline": 60.0}, role="kv_consumer"),
    )
    prompt = tokens(20)
    given = hand_off(prefill, prompt)
    assert load(decode, prompt, copy.deepcopy(given)).loaded_tokens == 20
    with returns_within(2.0):
        assert load(decode, prompt, given).loaded_tokens == 0
    assert decode.counts["handoffs_failed"] == 1
    assert "are missing: gone" in caplog.text


def test_loads_from_a_prefill_that_is_gone_hold_up_no_others(open_engine: Open) -> None:
    prefill = open_engine(role="kv_producer")
    decode = open_engine({"load_deadline": 15.0}, role="kv_consumer", n_blocks=512)
    gone = of_rank(hand_off(prefill, tokens(BLOCK)), node_id="gone", boot="1")
    for _ in range(80):  # each would be waited for, and there are threads for few
        decode.submit(tokens(BLOCK), gone)
    decode.step()
    prompt = tokens(20, seed=99)
    request = load(decode, prompt, hand_off(prefill, prompt))
    assert request.loaded_tokens == 20
    assert decode.is_right(request)


class HungUp:
    """What a grant says whose peer was taken for dead: nothing came."""

    def __init__(self, n_rows: int) -> None:
        self._statuses = np.full(n_rows, RowStatus.PEER_LOST, np.uint8)

    def done(self) -> bool:
        return True

    def statuses(self) -> np.ndarray:
        return self._statuses

    revoke = statuses


class HungUpOnce(Node):
    """A node that loses the way to its peer in the first ``n_lost`` gets."""

    n_lost = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_gets, get_async = 0, self.transfers.get_async

        def lose(node_id: str, name: str, rows: np.ndarray, **options: Any) -> Any:
            self.n_gets += 1
            return (
                HungUp(len(rows)) if self.n_gets <= self.n_lost else get_async(node_id, name, rows, **options)
            )

        self.transfers.get_async = lose  # type: ignore[method-assign]


class HungUpForGood(HungUpOnce):
    n_lost = 1000


def test_a_way_that_was_lost_is_tried_again_and_given_up_soon(open_engine: Open) -> None:
    prefill = open_engine(role="kv_producer")
    for kind, is_loaded in ((HungUpOnce, True), (HungUpForGood, False)):
        decode = open_engine(role="kv_consumer", start_node=kind)
        prompt = tokens(3 * BLOCK + 1, seed=int(is_loaded))
        request = load(decode, prompt, hand_off(prefill, prompt))
        assert request.loaded_tokens == (len(prompt) if is_loaded else 0)
        assert decode.is_right(request) if is_loaded else decode.counts["handoffs_failed"] == 1
        assert decode.node.n_gets <= 5


def test_instances_that_would_not_compute_the_same_bytes_refuse_each_other(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = open_engine(dtype="float16"), open_engine()
    prompt = tokens(10)
    assert load(decode, prompt, hand_off(prefill, prompt)).loaded_tokens == 0
    assert "layout is" in caplog.text
    assert "float16' there" in caplog.text


def test_what_nobody_takes_is_freed_when_its_lease_ends(open_engine: Open) -> None:
    prefill, decode = open_engine({"transfer_lease": 0.3}), open_engine({"load_deadline": 0.3})
    given = hand_off(prefill, tokens(20))
    prefill.step_until(lambda: not prefill.requests)
    assert prefill.counts["handoffs_expired"] == 1
    assert sorted(prefill.free) == list(range(64))
    assert load(decode, tokens(20), given).loaded_tokens == 0


def test_blocks_that_are_not_kept_reach_decode_as_another_prompts(open_engine: Open) -> None:
    """The safeguard broken on purpose: an engine that frees what is offered has decode load wrong KV."""
    prefill, decode = open_engine(role="kv_producer", keeps_blocks=False), open_engine()
    prompt = tokens(5 * BLOCK)
    request = prefill.submit(prompt, PREFILL)
    prefill.step()
    prefill.overwrite(request.block_ids)
    prefill.step()
    assert request.answer is not None
    loaded = load(decode, prompt, copy.deepcopy(request.answer))
    assert loaded.loaded_tokens == 5 * BLOCK
    assert not decode.is_right(loaded)


def test_a_prefix_published_by_one_instance_is_loaded_by_another(open_engine: Open) -> None:
    first, second = open_engine({"share_prefixes": True}), open_engine(role="kv_consumer")
    shared = tokens(6 * BLOCK)
    first.run(first.submit([*shared, 7, 8, 9]))
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 6 and not first.requests)

    request = load_prefix(second, [*shared, 1, 2], 6 * BLOCK)
    assert second.is_right(request, 6)
    assert second.counts["prefix_blocks_loaded"] >= 6

    load_prefix(second, shared, 5 * BLOCK)  # never the last token: it has to be computed
    unknown = second.submit([99, *shared])
    second.run(unknown)
    assert unknown.loaded_tokens == 0


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
    first.step_until(lambda: not first.requests)
    assert sorted(first.free) == list(range(64))


def test_a_preempted_requests_blocks_are_not_published_any_more(
    open_engine: Open, slow: type[SlowToPublish]
) -> None:
    first = open_engine(role="kv_producer", start_node=slow.start)
    blocker = first.submit(tokens(2 * BLOCK))
    first.step()
    slow.has_begun.wait(60.0)
    victim = first.submit(tokens(3 * BLOCK, seed=1))
    victim.runs_on = True
    first.step()
    first.preempt(victim)
    first.step()
    slow.may_publish.set()
    first.step_until(lambda: blocker.request_id not in first.requests)
    assert first.counts["prefix_blocks_published"] == 2


class Broken(Node):
    """A node that starts, and all of whose calls end in a bug."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.transfers = SimpleNamespace(set_view=lambda old, new: None)  # type: ignore[assignment]

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
    broken.step_until(lambda: not broken.requests)
    assert sorted(broken.free) == list(range(64))
    assert broken.counts["handoffs_failed"] == 1
    assert broken.counts["prefix_blocks_unpublished"] > 0


def test_weights_that_change_take_back_what_was_published(open_engine: Open) -> None:
    engine = open_engine()
    engine.run(engine.submit(tokens(20)))
    engine.step_until(lambda: engine.counts.get("prefix_blocks_published") == 5)
    assert engine.scheduler.reset_cache()
    assert engine.scheduler.has_pending_push_work()
    engine.step()
    assert not engine.scheduler.has_pending_push_work()
    assert engine.node.counters()["p2pkv_pool_pages"] == 0


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
