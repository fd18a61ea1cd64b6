"""Real vLLM servers of models whose layers keep different KV hand prompts over and share prefixes: ``make test-vllm``.

A Gemma 3 has windows beside full attention, an LFM2 convolutions with a state. vLLM gives them several KV cache groups.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv

from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS = (2, 31, 32, 33, 64, 65, 66, 97, 257, 500, 1025)
NOTICED_S = 40.0


def prompt(n_tokens: int, seed: int) -> list[int]:
    random = Random(f"{n_tokens}/{seed}")
    return [random.randrange(300, 4000) for _ in range(n_tokens)]


class Pair:
    """A server that prefills, and one that decodes and computes again what it can't load."""

    def __init__(self, folder: Path, model: str) -> None:
        settings = {"join": [f"127.0.0.1:{lasting_port()}"], "load_deadline": 15.0, "transfer_lease": 25.0}

        def start(name: str, role: str) -> VLLMServer:
            transfer = p2pkv({"node_id": name, **settings}, role=role, policy="recompute")
            return VLLMServer(folder / f"{model}-{name}.log", transfer, model=model)

        self.has_states = model == "tiny-states"
        self.prefill, self.decode = start("prefill", "kv_producer"), start("decode", "kv_both")
        try:
            self.prefill.wait_until_ready()
            self.decode.wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()

    def external(self) -> int:
        return self.decode.prompt_tokens("external_kv_transfer")


@pytest.fixture(scope="module", params=["tiny-windows", "tiny-states"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start two servers of a model."""
    pair = Pair(tmp_path_factory.mktemp("vllm"), request.param)
    yield pair
    pair.kill()


def far(one: dict[str, float], other: dict[str, float]) -> float:
    """Return by how much log probabilities differ, on average."""
    least = min(other.values())
    return sum(abs(likely - other.get(token, least)) for token, likely in one.items()) / len(one)


def test_decode_goes_on_as_a_single_instance_would(pair: Pair) -> None:
    """From windows to the token. A state is taken on by one token in lower precision than by several, in vLLM itself.

    So there what is likely next must be nearer than after a prompt of which one of the tokens differs that it is of.
    """
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    alone = [pair.prefill.ids(tokens) for tokens in prompts]
    assert len({tuple(ids) for ids in alone}) == len(alone), (
        "outputs that are all the same would hide wrong KV"
    )

    before = pair.external()
    for tokens, ids in zip(prompts, alone, strict=True):
        given = pair.prefill.prefill(tokens)
        if pair.has_states:
            expected = pair.prefill.next_token(tokens)
            other = pair.prefill.next_token([*tokens[:-2], 500, tokens[-1]])
            found = pair.decode.next_token(tokens, params=given)
            assert far(found, expected) * 4 < far(other, expected), len(tokens)
        else:
            assert pair.decode.ids(tokens, params=given) == ids, len(tokens)
    eventually(lambda: pair.decode.counted("handoffs_loaded") == len(prompts), NOTICED_S)
    assert pair.decode.counted("handoffs_failed") == 0
    assert pair.external() - before == sum(n - 1 for n in LENGTHS), "all but the last token of each"
    eventually(lambda: pair.prefill.counted("handoffs_taken") == len(prompts), NOTICED_S)
    for server in (pair.prefill, pair.decode):
        eventually(lambda server=server: server.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)  # type: ignore[misc]


def test_what_can_not_be_loaded_is_computed(pair: Pair) -> None:
    tokens = prompt(200, seed=2)
    failed = pair.decode.counted("handoffs_failed")
    given = copy.deepcopy(pair.prefill.prefill(tokens))
    given["p2pkv"]["ranks"][0][1] = "1"  # an earlier boot
    assert pair.decode.ids(tokens, params=given) == pair.prefill.ids(tokens)
    eventually(lambda: pair.decode.counted("handoffs_failed") == failed + 1, NOTICED_S)


def test_a_prefix_is_shared_unless_there_are_states(pair: Pair) -> None:
    assert ("only the state" in pair.prefill.log.read_text(errors="replace")) == pair.has_states
    shared = prompt(6 * BLOCK, seed=3)
    published = pair.prefill.counted("prefix_blocks_published")
    expected = pair.prefill.ids([*shared, 400, 500])
    if not pair.has_states:
        eventually(lambda: pair.prefill.counted("prefix_blocks_published") > published, NOTICED_S)
        eventually(lambda: pair.prefill.count("vllm:kv_cache_usage_perc") == 0, NOTICED_S)
    before = pair.external()
    for n_shared in (6, 4):
        tokens = [*shared[: n_shared * BLOCK], 400, 500]
        ids = pair.decode.ids(tokens)
        assert ids == (expected if n_shared == 6 else pair.prefill.ids(tokens))
        assert pair.external() - before == (0 if pair.has_states else n_shared * BLOCK)
        before = pair.external()
