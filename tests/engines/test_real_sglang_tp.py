"""Real SGLang servers of unequal parallelism hand KV over through p2pkv: ``make test-sglang-pd``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_pair import Pair, failures
from sglang_server import READY_S, SGLangServer
from test_real_sglang_pd import DEADLINE_S, LENGTHS, N_TOKENS, ROWS_OF_A_PAGE, Answers, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return what a single server answers."""
    server = SGLangServer(tmp_path_factory.mktemp("single") / "single.log")
    try:
        server.wait_until_ready()
        return {n: list(server.generate(prompt(n), N_TOKENS)["output_ids"]) for n in range(len(LENGTHS))}
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [((1, 2), 1), ((2, 1), 1), ((1, 1), 2)],
    ids=["1 to 2", "2 to 1", "2 pipeline stages to 1"],
)
def test_decode_has_the_heads_and_layers_of_prefills_ranks(
    tmp_path: Path, right: Answers, ranks: tuple[int, int], stages: int
) -> None:
    pair = Pair(tmp_path, ranks=ranks, stages=stages)
    try:
        pair.prefill.wait_until_ready()
        pair.decode.wait_until_ready()
        # A machine's first server of so many ranks compiles code with its first prompt of one token and its first of
        # several, which is no request's time. Both prompts are less than a page, so that no cache has them afterwards.
        for n in (0, 1):
            pair.generate(prompt(n), N_TOKENS, timeout=READY_S)
        given = {n: list(pair.generate(prompt(n), N_TOKENS, timeout=DEADLINE_S)["output_ids"]) for n in right}
        assert given == right
        rows = pair.decode.counters()["p2pkv_granted_rows_total"]  # of the first rank
        # a row a token where heads are split, else one a page for each layer's K and V
        n_tokens = sum(len(prompt(n)) for n in right)
        assert rows >= (n_tokens if ranks != (1, 1) else n_tokens / 16 * ROWS_OF_A_PAGE)
        assert failures(pair.prefill) == failures(pair.decode) == {}
    finally:
        pair.close()
