"""A real vLLM server loads what another one has computed as long as that pays, and computes it when the other is slow.

Both servers compute the same prompts; the second could load nearly all of each. It is the transport that is made slow,
by so much a page that a prompt takes ten times as long to load as to compute.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from vllm_server import BLOCK, VLLMServer, lasting_port, p2pkv

import slow_transport
from cluster import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCKS = 32
N_TOKENS = BLOCKS * BLOCK + 9
IN_A_ROW, MOST, AT_MOST = 8, 7, 50
"""Of so many prompts in a row so many go the way that pays, after so many at most: one may be a probe."""
SMALL_STEPS = ("--max-num-batched-tokens", "32")
"""Of the reader: a tiny model would compute a prompt in the time in which two busy cores hand over a page."""
NOTICED_S = 60.0


def prompt(seed: int) -> list[int]:
    random = Random(f"recompute/{seed}")
    return [random.randrange(300, 4000) for _ in range(N_TOKENS)]


class Pair:
    """A server that has computed prompts, and one that loads them or computes them again."""

    def __init__(self, folder: Path) -> None:
        self.pause = folder / "pause"
        self.pause.write_text("0")
        environment = slow_transport.install(folder / "site-packages")
        settings = {
            "join": [f"127.0.0.1:{lasting_port()}"],
            "transports": ["slow", "tcp"],  # hand-offs need one of the native core
            "load_deadline": 30.0,
            "deadline": 5.0,
        }
        self._metrics_port = lasting_port()
        self.owner = VLLMServer(
            folder / "owner.log",
            p2pkv({"node_id": "owner", **settings}, policy="recompute"),
            environment=environment | {slow_transport.PAUSE_FILE: str(self.pause)},
        )
        measured = {"fetch_prefixes": "measured", "metrics_port": self._metrics_port}
        self.reader = VLLMServer(
            folder / "reader.log",
            p2pkv({"node_id": "reader", **settings, **measured}, policy="recompute"),
            environment=environment,
            options=SMALL_STEPS,
        )
        for server in (self.owner, self.reader):
            server.wait_until_ready()
        self._seed = 0

    def decisions(self) -> dict[tuple[str, str], int]:
        """Return how often the reader's scheduler has decided what, and why."""
        found = re.findall(
            r'^p2pkv_recompute_decisions_total\{choice="(\w+)",reason="(\w+)"\} (\S+)', self.metrics(), re.M
        )
        return {(choice, reason): int(float(n)) for choice, reason, n in found}

    def seconds(self) -> dict[str, float]:
        """Return what came of it."""
        found = re.findall(r'^p2pkv_recompute_seconds_total\{figure="(\w+)"\} (\S+)', self.metrics(), re.M)
        return {figure: float(seconds) for figure, seconds in found}

    def metrics(self) -> str:
        """Return the metrics of the node of the reader's scheduler."""
        url = f"http://127.0.0.1:{self._metrics_port + 1}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            text: str = response.read().decode()
        return text

    def computes(self) -> float:
        """Have the reader compute a prompt that nobody has; return how long that takes."""
        self._seed += 1
        began = time.monotonic()
        self.reader.ids(prompt(self._seed), 1)
        return time.monotonic() - began

    def share(self) -> tuple[str, bool]:
        """Have the owner compute a prompt, and then the reader; return its decision, and whether it loaded most."""
        self._seed += 1
        tokens = prompt(self._seed)
        published = self.owner.counted("prefix_blocks_published")
        ids = self.owner.ids(tokens)
        eventually(lambda: self.owner.counted("prefix_blocks_published") >= published + BLOCKS, NOTICED_S)
        before, loaded = self.decisions(), self.reader.prompt_tokens("external_kv_transfer")
        assert self.reader.ids(tokens) == ids
        after = self.decisions()
        (made,) = [key for key, n in after.items() if n != before.get(key, 0)]
        n_loaded = self.reader.prompt_tokens("external_kv_transfer") - loaded
        print(made, n_loaded, "tokens loaded")
        return made[0], n_loaded > N_TOKENS // 2

    def settles(self, choice: str) -> list[bool]:
        """Share prompts until most decisions are this; return which of the last ones were loaded."""
        history: list[tuple[str, bool]] = []
        for _ in range(AT_MOST):
            history.append(self.share())
            last = history[-IN_A_ROW:]
            if [made for made, _ in last].count(choice) >= MOST:
                return [was_loaded for _, was_loaded in last]
        raise AssertionError(f"it does not come to {choice}: {history}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("recompute"))
    yield pair
    pair.owner.kill()
    pair.reader.kill()


def test_each_loads_what_the_other_has_computed(pair: Pair) -> None:
    for seed, (first, second) in enumerate(((pair.owner, pair.reader), (pair.reader, pair.owner))):
        tokens = prompt(-1 - seed)
        published, loaded = (
            first.counted("prefix_blocks_published"),
            second.prompt_tokens("external_kv_transfer"),
        )
        ids = first.ids(tokens)
        eventually(lambda: first.counted("prefix_blocks_published") >= published + BLOCKS, NOTICED_S)  # noqa: B023
        assert second.ids(tokens) == ids
        assert second.prompt_tokens("external_kv_transfer") == loaded + BLOCKS * BLOCK


def test_a_prefix_is_loaded_from_a_quick_owner_and_computed_beside_a_slow_one(pair: Pair) -> None:
    computing_s = sorted(pair.computes() for _ in range(5))[2]
    quick = pair.settles("fetch_all")
    assert sum(quick) >= MOST

    pair.pause.write_text(str(10 * computing_s / BLOCKS))
    slow = pair.settles("recompute")
    assert sum(slow) <= IN_A_ROW - MOST
    assert pair.reader.counted("prefix_blocks_recomputed") >= MOST * BLOCKS
    seconds = pair.seconds()
    print(seconds)
    assert seconds["regret"] < seconds["real"]
