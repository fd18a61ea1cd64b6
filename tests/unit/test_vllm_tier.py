"""A tier of vLLM's offloading, without vLLM: what it answers, when it is asked in vain, and what it never does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import offloading
from cluster import eventually
from hicache_backends import FailingNode
from offloading import job, request
from p2pkv import Node
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.integrations.vllm_connector.weights import Weights
from p2pkv.integrations.vllm_offloading.jobs import LOADING
from p2pkv.integrations.vllm_tier import P2PKVTier

KEYS = [b"%032d" % i for i in range(4)]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(opened: ExitStack, **settings: Any) -> tuple[P2PKVTier, P2PKVTier, offloading.Memory]:
    """Return a tier that has stored all keys, one that has not, and the other's memory."""
    ours, theirs = offloading.Memory(8), offloading.Memory(8)
    for chunk, key in enumerate(KEYS):
        ours.write(chunk, key)
    writer = offloading.tier(ours, **settings)
    opened.callback(writer.shutdown)
    reader = offloading.tier(theirs, join=[writer.node.address], **settings)
    opened.callback(reader.shutdown)
    eventually(lambda: len(writer.node.members()) == len(reader.node.members()) == 2, 10.0)
    writer.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    (result,) = finished(writer)
    assert result.success
    return writer, reader, theirs


def finished(tier: P2PKVTier, n: int = 1) -> list[Any]:
    found: list[Any] = []

    def come() -> bool:
        found.extend(tier.get_finished_jobs())
        return len(found) >= n

    eventually(come, 10.0)
    return found


def looked_up(tier: P2PKVTier, keys: list[bytes], request_id: str = "r") -> list[str]:
    answers: list[str] = []

    def known() -> bool:
        answers[:] = [tier.lookup(key, request(request_id)).name for key in keys]
        tier.on_schedule_end(None)
        return "RETRY" not in answers

    eventually(known, 10.0)
    return answers


def test_chunks_that_one_server_stores_another_one_loads(opened: ExitStack) -> None:
    _, reader, memory = pair(opened)
    assert looked_up(reader, [*KEYS, b"nobody's"]) == ["HIT"] * 4 + ["MISS"]
    reader.submit_load(job(7, KEYS, [7, 5, 6, 4]))
    (result,) = finished(reader)
    assert (result.job_id, result.success, result.transfer_bytes) == (7, True, 4 * offloading.CHUNK)
    assert all(memory.holds(chunk, key) for chunk, key in zip([7, 5, 6, 4], KEYS, strict=True))


def test_what_a_step_wants_to_know_is_one_round_and_the_scheduler_waits_for_none(opened: ExitStack) -> None:
    rounds: list[int] = []
    goes_on = threading.Event()

    class Slow(FailingNode):
        def exists(self, names: list[bytes]) -> Any:
            rounds.append(len(names))
            goes_on.wait(10.0)
            raise ZeroDivisionError

    tier = offloading.tier(offloading.Memory(1), start_node=Slow)
    opened.callback(tier.shutdown)
    for request_id in ("a", "b"):
        assert {tier.lookup(key, request(request_id)).name for key in KEYS} == {"RETRY"}
    tier.on_schedule_end(None)
    assert tier.lookup(KEYS[0], request("a")).name == "RETRY"
    goes_on.set()
    assert looked_up(tier, KEYS, "a") == looked_up(tier, KEYS, "b") == ["MISS"] * 4
    assert rounds == [4]


def test_of_a_load_what_came_counts_and_what_did_not_is_a_miss(opened: ExitStack) -> None:
    writer, reader, memory = pair(opened)
    assert looked_up(reader, KEYS) == ["HIT"] * 4
    assert writer.node.retract([KEYS[1]]).all()
    reader.submit_load(job(1, KEYS, [0, 1, 2, 3]))
    (result,) = finished(reader)
    assert (result.success, set(result.successful_keys)) == (False, {KEYS[0], KEYS[2], KEYS[3]})
    assert all(memory.holds(chunk, KEYS[chunk]) for chunk in (0, 2, 3))
    assert looked_up(reader, KEYS) == ["HIT", "MISS", "HIT", "HIT"], "or vLLM asks for it for ever"


def test_of_other_weights_nothing_is_found_and_of_the_same_version_all_is(opened: ExitStack) -> None:
    weights = Weights()
    _, reader, _ = pair(opened, weights=weights)
    assert looked_up(reader, KEYS) == ["HIT"] * 4
    reader.drain_jobs()
    assert looked_up(reader, KEYS) == ["MISS"] * 4
    reader.submit_load(job(2, KEYS, [0, 1, 2, 3]))
    (result,) = finished(reader)
    assert not result.success
    assert not result.successful_keys


def test_when_a_drain_returns_all_jobs_have_ended(opened: ExitStack) -> None:
    writer, reader, _ = pair(opened)
    for number in range(20):
        reader.submit_load(job(number, KEYS, [0, 1, 2, 3]))
        writer.submit_store(job(100 + number, KEYS, [0, 1, 2, 3]))
    for tier, numbers in ((reader, range(20)), (writer, range(100, 120))):
        tier.drain_jobs()
        assert sorted(result.job_id for result in tier.get_finished_jobs()) == list(numbers)
        assert not tier.get_finished_jobs()


def test_an_error_is_a_miss_and_every_job_is_reported(opened: ExitStack) -> None:
    tier = offloading.tier(offloading.Memory(8), start_node=FailingNode)
    opened.callback(tier.shutdown)
    assert looked_up(tier, KEYS) == ["MISS"] * 4
    for number in range(2 * LOADING):
        start = tier.submit_load if number % 2 else tier.submit_store
        start(job(number, KEYS, [0, 1, 2, 3]))
    results = finished(tier, 2 * LOADING)
    assert sorted(result.job_id for result in results) == list(range(2 * LOADING))
    assert not any(result.success or result.successful_keys for result in results)
    counters = tier.node.metrics.counters()
    assert counters['p2pkv_failed_calls_total{operation="set",cause="ZeroDivisionError"}'] == LOADING


def test_a_job_without_a_thread_is_reported(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = offloading.tier(offloading.Memory(8), start_node=FailingNode)
    opened.callback(tier.shutdown)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        tier.submit_load(job(3, KEYS, [0, 1, 2, 3]))
    assert [(result.job_id, result.success) for result in finished(tier)] == [(3, False)]


def test_chunks_of_other_models_have_other_names() -> None:
    seen: list[str] = []

    def start(config: Config) -> Node:
        seen.append(config.namespace)
        return FailingNode(config)  # type: ignore[return-value]

    plain = offloading.told()
    others: list[Any] = [
        offloading.told(kv_cache_layout="HND"),
        offloading.told(replicated_layout=True),
        offloading.told(canonical_layout=True),
    ]
    for part, name, value in (
        ("model", "name", "another-model"),
        ("model", "dtype", "fp8"),
        ("cache", "blocks_per_chunk", 2),
        ("cache", "tokens_per_hash", 8),
        ("parallel", "world_size", 2),
        ("parallel", "tp_size", 2),
        ("parallel", "pp_size", 2),
        ("parallel", "dcp_size", 2),
    ):
        other = offloading.told()
        setattr(getattr(other, part), name, value)
        others.append(other)
    other = offloading.told()
    other.groups[0].layer_names = ("layers.0",)
    for offered in (plain, offloading.told(), *others, other):
        offloading.tier(offloading.Memory(1), offered, start_node=start).shutdown()
    assert seen[0] == seen[1], "two servers that differ in nothing share all"
    assert len(set(seen)) == 2 + len(others)
    replica = offloading.told()
    replica.parallel.data_parallel_index = 3
    offloading.tier(offloading.Memory(1), replica, start_node=start).shutdown()
    assert seen[-1] == seen[0], "replicas have the same chunks"


def test_without_a_namespace_nobody_shares(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def start(config: Config) -> Node:
        seen.append(config.namespace)
        return FailingNode(config)  # type: ignore[return-value]

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            offloading.tier(offloading.Memory(1), start_node=start, namespace="default").shutdown()
    assert seen[0] != seen[1]
    assert "set 'namespace'" in caplog.text


def test_a_wrong_setting_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="pool_size"):
        offloading.tier(offloading.Memory(1), pool_sise="1GiB", start_node=FailingNode)


@pytest.mark.parametrize("is_attached", [False, True], ids=["", "attached"])
def test_events_tell_what_is_stored_and_what_is_evicted(
    opened: ExitStack, tmp_path: Path, *, is_attached: bool
) -> None:
    memory = offloading.Memory(64)
    keys = [b"%032d" % i + (i % 2).to_bytes(4, "big") for i in range(200)]
    settings: dict[str, Any] = {"namespace": "a test", "pool_size": "256KiB", "deadline": 5.0}
    if is_attached:
        tmp_path.chmod(0o700)
        host = Config(node_id="host", pool_size="256KiB", attach_listen=f"unix:{tmp_path}/s")
        opened.enter_context(Node.start(host))
        settings["attach"] = host.attach_listen
    tier = P2PKVTier(offloading.spec(tells_events=True), memory.array.data, "p", **settings)
    opened.callback(tier.shutdown)
    there: set[bytes] = set()

    def heard() -> set[bytes]:
        for event in tier.take_events():
            assert event.medium == "CPU"
            (there.difference_update if event.removed else there.update)(event.keys)
        return there

    for number in range(4):
        tier.submit_store(job(number, keys[50 * number : 50 * (number + 1)], list(range(50))))
        finished(tier)

    def held() -> set[bytes]:
        return {key for key, found in zip(keys, tier.node.exists(keys), strict=True) if found}

    eventually(lambda: heard() == held(), 10.0)
    assert 0 < len(heard()) < 200, "the pool is too small for all"


def test_vllm_has_its_memory_back_after_the_end(opened: ExitStack) -> None:
    memory = offloading.Memory(8)
    view = memory.array.data
    tier = P2PKVTier(offloading.spec(), view, "p", namespace="a test", pool_size=0)
    tier.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    tier.shutdown()
    tier.shutdown()
    view.release()  # raises while anybody has it
