"""vLLM's connector with a buddy pool: decode may be slow or dead, and prefill has its blocks all the same."""

from __future__ import annotations

import numpy as np
import pytest

from p2pkv.errors import ConfigError, UsageError
from p2pkv.integrations.vllm_connector.stowing import Copies
from vllm_engine import EngineFake
from vllm_fakes import BLOCK
from vllm_instances import Open, hand_off, load, tokens

STOWS = {"buddy_pool_size": "8MiB", "stow_after": 0.05, "transfer_lease": 60.0}


@pytest.fixture(params=[False, True], ids=["", "attached"])
def attached(request: pytest.FixtureRequest) -> bool:
    """By themselves, and as engines of their host's node."""
    return bool(request.param)


def overwrite_free(engine: EngineFake) -> None:
    engine.overwrite(list(engine.free))


def test_prefill_has_its_blocks_back_and_decode_the_right_bytes(open_engine: Open) -> None:
    prefill, decode = open_engine(STOWS, role="kv_producer"), open_engine(role="kv_consumer")
    prompts = [tokens(n, seed) for seed, n in enumerate((1, BLOCK, 3 * BLOCK + 1))]
    given = [hand_off(prefill, prompt) for prompt in prompts]
    prefill.step_until(lambda: prefill.is_idle)
    assert sorted(prefill.free) == list(range(1, 64))
    assert prefill.counts["handoffs_stowed"] == len(prompts)
    overwrite_free(prefill)
    for prompt, params in zip(prompts, given, strict=True):
        request = load(decode, prompt, params)
        assert request.loaded_tokens == len(prompt)
        assert decode.is_right(request)
        decode.run(request)
    prefill.step_until(lambda: prefill.counts.get("handoffs_taken") == len(prompts))
    assert prefill.member.counters()["p2pkv_buddy_pool_used_bytes"] == 0
    assert "handoffs_failed" not in decode.counts


def test_what_nobody_ever_takes_leaves_the_buddy_pool_when_its_lease_ends(open_engine: Open) -> None:
    prefill = open_engine(STOWS | {"transfer_lease": 0.5}, role="kv_producer")
    hand_off(prefill, tokens(20))
    prefill.step_until(lambda: prefill.is_idle)
    prefill.step_until(lambda: prefill.counts.get("handoffs_expired") == 1)
    assert prefill.counts["handoffs_stowed"] == 1
    assert prefill.member.counters()["p2pkv_buddy_pool_used_bytes"] == 0


def test_a_full_buddy_pool_takes_the_next_hand_off_when_there_is_room_again(open_engine: Open) -> None:
    # of two layers' blocks, each padded to a granule of 4 KiB
    prefill = open_engine(STOWS | {"buddy_pool_size": "8KiB"}, role="kv_producer")
    decode = open_engine(role="kv_consumer")
    prompts = [tokens(BLOCK, seed) for seed in range(4)]
    given = [hand_off(prefill, prompt) for prompt in prompts]
    prefill.step_until(lambda: prefill.counts.get("handoffs_stowed", 0) >= 1)
    unstowed = prefill.member.counters
    prefill.step_until(lambda: unstowed()["p2pkv_unstowed_offers_total"] > 0)
    assert len(prefill.free) < 63
    for prompt, params in zip(prompts, given, strict=True):
        request = load(decode, prompt, params)
        assert decode.is_right(request)
    prefill.step_until(lambda: prefill.is_idle)
    assert sorted(prefill.free) == list(range(1, 64))
    assert unstowed()["p2pkv_buddy_pool_used_bytes"] == 0


def test_a_wrong_time_is_refused(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match="stow_after must be above 0"):
        open_engine(STOWS | {"stow_after": 0})


class Room:
    """Copies that lie somewhere."""

    def __init__(self, spans: np.ndarray) -> None:
        self.spans = spans


def test_parts_of_rows_are_found_in_their_copies() -> None:
    copies = Copies()
    copies.add(np.array([[1000, 100], [300, 50]]), Room(np.array([[7000, 100], [7128, 50]])))  # type: ignore[arg-type]
    # somebody had taken the second of these before
    copies.add(np.array([[500, 10], [600, 10]]), Room(np.array([[9000, 10], [0, 0]])))  # type: ignore[arg-type]
    wanted = np.array([[1000, 100], [1090, 10], [300, 1], [349, 1], [505, 5]])
    assert copies.of(wanted).tolist() == [[7000, 100], [7090, 10], [7128, 1], [7177, 1], [9005, 5]]
    for beyond in ([299, 1], [1090, 11], [350, 1], [510, 1], [400, 5], [600, 1]):
        with pytest.raises(UsageError, match="before the others were copied"):
            copies.of(np.array([beyond]))
