"""Models of several groups of layers, which keep different blocks of a prompt, under vLLM's rules."""

from __future__ import annotations

import random

import pytest

from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake
from vllm_instances import PREFILL, Open, hand_off, load, load_prefix, tokens

MODELS = {
    "windows": ("full", "window", "wide"),
    "chunks": ("full", "chunk"),
    "states": ("state", "full"),
    "all": ("full", "window", "chunk", "state"),
    "window": ("window",),
    "chunk": ("chunk",),
    "state": ("state",),
}
SHARING = [name for name, kinds in MODELS.items() if "state" not in kinds]
"""Models whose instances share prefixes."""

a_model = pytest.mark.parametrize("model", MODELS)


def is_whole(engine: EngineFake) -> bool:
    return engine.is_idle and sorted(engine.free) == list(range(1, len(engine.pool.blocks)))


@a_model
@pytest.mark.parametrize("chunk", [1 << 20, 5])
def test_decode_goes_on_from_what_prefill_has_left(open_engine: Open, model: str, chunk: int) -> None:
    """All but the last token, which decode computes: from that on its groups must hold what one engine's would."""
    options = {"kinds": MODELS[model], "chunk": chunk}
    prefill, decode = open_engine(role="kv_producer", **options), open_engine(role="kv_consumer", **options)
    lengths = [2, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3, 30]
    for seed, n in enumerate(lengths):
        request = load(decode, tokens(n, seed), hand_off(prefill, tokens(n, seed)))
        assert request.loaded_tokens == n - 1
        assert decode.is_right(request)
        decode.run(request)
        prefill.step_until(lambda: is_whole(prefill))
        decode.step_until(lambda: is_whole(decode))
    assert prefill.counts["handoffs_taken"] == decode.counts["handoffs_loaded"] == len(lengths)
    assert "handoffs_failed" not in decode.counts
    assert not decode.wrong + prefill.wrong


def test_no_more_of_a_window_is_moved_than_decode_looks_back_at(open_engine: Open) -> None:
    kinds = ("full", "window")
    prefill = open_engine(role="kv_producer", kinds=kinds)
    decode = open_engine(role="kv_consumer", kinds=kinds)
    prompt = tokens(10 * BLOCK + 1)
    decode.run(load(decode, prompt, hand_off(prefill, prompt)))
    assert decode.counts["handoff_blocks"] == 10 + 2


def test_a_prompt_of_one_token_is_computed_by_decode(open_engine: Open) -> None:
    kinds = MODELS["all"]
    prefill = open_engine(role="kv_producer", kinds=kinds)
    request = prefill.run(prefill.submit(tokens(1), PREFILL))
    assert request.answer is None
    prefill.step_until(lambda: is_whole(prefill))


def test_a_prefill_that_is_preempted_leaves_its_last_token_once(open_engine: Open) -> None:
    kinds = MODELS["all"]
    prefill = open_engine(role="kv_producer", kinds=kinds)
    request = prefill.submit(tokens(10), PREFILL)
    prefill.scheduler.on_new_request(request)
    assert request.num_tokens == request.num_prompt_tokens == len(request.prompt_token_ids) == 9
    assert len(request.block_hashes) == 2


@a_model
def test_what_decode_has_already_is_not_loaded(open_engine: Open, model: str) -> None:
    if "state" in MODELS[model]:
        pytest.skip("vLLM has no prefix of a state in the middle of its block")
    options = {"kinds": MODELS[model]}
    prefill, decode = open_engine(role="kv_producer", **options), open_engine(role="kv_consumer", **options)
    prompt = tokens(6 * BLOCK + 2)
    request = load(decode, prompt, hand_off(prefill, prompt), n_local=4 * BLOCK)
    assert request.loaded_tokens == 2 * BLOCK + 1
    assert decode.is_right(request)
    decode.run(request)
    assert not decode.wrong


@pytest.mark.parametrize("model", SHARING)
def test_a_prefix_is_found_where_its_windows_are(open_engine: Open, model: str) -> None:
    options = {"kinds": MODELS[model], "n_blocks": 512}
    first, second = open_engine(role="kv_producer", **options), open_engine(role="kv_consumer", **options)
    shared = tokens(8 * BLOCK)
    first.run(first.submit([*shared, 7, 8, 9]))
    n_groups = len(MODELS[model])
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 8 * n_groups and is_whole(first))
    for n_same in (8, 5, 3):
        prompt = [*shared[: n_same * BLOCK], 1, 2, 3]
        request = load_prefix(second, prompt, n_same * BLOCK)
        assert second.is_right(request, n_same)
        second.run(request)
    second.step_until(lambda: is_whole(second))
    assert not second.wrong


def test_a_window_that_is_gone_makes_the_prefix_shorter(open_engine: Open) -> None:
    """Nobody has published the middle of the windows: a prefix ends where they are whole."""
    options = {"kinds": ("full", "wide"), "n_blocks": 512}
    first, second = open_engine(**options), open_engine(role="kv_consumer", **options)
    shared = tokens(8 * BLOCK)
    first.run(first.submit([*shared, 7]))
    first.step_until(lambda: first.counts.get("prefix_blocks_published") == 16)
    lookups = second.scheduler._scheduler._lookups
    assert lookups is not None
    (part,) = lookups._parts[1]
    hashes = first.submit(shared).block_hashes
    first.node.retract([part.key(hashes[5])])
    # a token looks back at eleven: after 6, 7 or 8 blocks at the one that is gone
    request = load_prefix(second, [*shared, 1], 5 * BLOCK)
    assert second.is_right(request, 5)


def test_prefixes_of_states_are_not_shared(open_engine: Open, caplog: pytest.LogCaptureFixture) -> None:
    engine = open_engine(kinds=MODELS["states"])
    assert "only the state after the whole prompt is kept" in caplog.text
    engine.run(engine.submit(tokens(20)))
    engine.step_until(lambda: is_whole(engine))
    assert "prefix_blocks_published" not in engine.counts


@a_model
def test_a_load_that_fails_is_computed_whole_or_fails_its_request(open_engine: Open, model: str) -> None:
    options = {"kinds": MODELS[model]}
    prefill = open_engine(role="kv_producer", **options)
    for policy in ("recompute", "fail"):
        decode = open_engine({"load_deadline": 0.3}, role="kv_consumer", policy=policy, **options)
        given = hand_off(prefill, tokens(20))
        given["p2pkv"]["name"] = "made up"
        request = decode.run(decode.submit(tokens(20), given))
        assert (request.request_id in decode.errors) == (policy == "fail")
        decode.step_until(lambda decode=decode: is_whole(decode))  # type: ignore[misc]
        assert decode.counts["handoffs_failed"] == 1
        assert not decode.wrong


@pytest.mark.parametrize("model", SHARING)
@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_share_prefixes_are_computed_from_their_own_kv(
    open_engine: Open, model: str, seed: int
) -> None:
    """Prompts of a tree, in steps of random length, on instances that preempt: no token sees KV that isn't its own."""
    rng = random.Random(seed)
    options = {"kinds": MODELS[model], "n_blocks": 256}
    engines = [open_engine({"pool_size": "256KiB"}, chunk=rng.randrange(3, 12), **options) for _ in range(2)]
    for _ in range(25):
        engine = rng.choice(engines)
        prompt = [rng.randrange(2) for _ in range(2)] + tokens(rng.randrange(4, 50))
        request = engine.submit(prompt)
        for _ in range(rng.randrange(8)):
            engine.step()
        if request.state == "running" and rng.random() < 0.3:
            preempted(engine, request)
        engine.run(request)
    for engine in engines:
        engine.step_until(lambda engine=engine: is_whole(engine))  # type: ignore[misc]
        assert not engine.wrong, f"seed {seed}"
    assert sum(engine.counts.get("prefix_blocks_loaded", 0) for engine in engines), (
        f"seed {seed}: nothing shared"
    )


def preempted(engine: EngineFake, request: RequestFake) -> None:
    engine.preempt(request)
    engine.step()
    request.state, request.n_local, request.loaded_tokens = "waiting", 0, 0
