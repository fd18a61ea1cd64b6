"""Two real SGLang servers share conversations for as long as one wants, while whatever can go wrong does.

``make test-sglang`` runs two minutes of it, ``P2PKV_SOAK_S=600`` ten. SGLang itself delays and fails calls of its
storage; clients hang up, servers stand still, die and come back to their disk with other policies, and weights are
replaced.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from sglang_prompts import NOTICED_S, PAGE, cached, meet
from sglang_server import READY_S, SGLangServer, hicache_server

from cluster import eventually
from demo.xpyd.real_engines import SGLang, lasting_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(7200)]

SOAK_S = float(os.environ.get("P2PKV_SOAK_S", "120"))
SEED = int(os.environ.get("P2PKV_SEED", "1"))
DEADLINE_S = 60.0
"""For any request: a few times what one takes where cores are scarce."""
N_TOKENS = 8
N_CONVERSATIONS, N_TURNS = 6, 30
SYSTEM_TOKENS, TURN_TOKENS = 20 * PAGE, 3 * PAGE
INJECTED = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.05",
}
PREFETCH = ("best_effort", "wait_complete", "timeout")
WRITE = ("write_through", "write_through_selective", "write_back")
FIRST_POLICIES = {
    "first": ("wait_complete", "write_through"),
    "second": ("timeout", "write_through_selective"),
}
EVENTS = {"ask": 15, "hang up": 3, "stand still": 1, "die": 1, "other weights": 1}
"""How often each comes in a round of them all."""


class Conversations:
    """Prompts that grow from turn to turn behind a system prompt that half of the conversations share."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._turns: dict[int, int] = dict.fromkeys(range(N_CONVERSATIONS), 0)

    def draw(self) -> list[int]:
        """Return the next turn of one of them; what follows the last turn is another conversation."""
        one = self._random.choice(sorted(self._turns))
        turn = self._turns[one]
        self._turns[one] = turn + 1
        if turn == N_TURNS:
            del self._turns[one]
            self._turns[one + N_CONVERSATIONS] = 0
        tokens = [Random(one % 2).randrange(300, 4000) for _ in range(SYSTEM_TOKENS)]
        own = Random(1000 + one)
        return tokens + [own.randrange(300, 4000) for _ in range((turn + 1) * TURN_TOKENS + 5)]


class Soak:
    """Two servers that share, one that computes everything by itself, and what is known of all three."""

    def __init__(self, folder: Path, other_weights: Path) -> None:
        self._random = Random(SEED)
        self._folder = folder
        self._join = f"127.0.0.1:{lasting_port()}"
        self._weights = {"default": SGLang.VENV / "tiny-model", "other": other_weights}
        self._version = "default"
        self._right: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._conversations = Conversations(self._random)
        self._from_storage: Counter[str] = Counter()
        self._n_starts = 0
        self._to_come: list[str] = []
        self.tokens: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._alone = SGLangServer(folder / "alone.log", ["--disable-radix-cache"])
        self.servers = {name: self._start(name) for name in ("first", "second")}

    def wait_until_ready(self) -> None:
        """Block until all answer, and the two have met."""
        for server in (self._alone, *self.servers.values()):
            server.wait_until_ready()
            # with its first prompt a machine's first server compiles what names pages, which is no request's time
            server.generate(self._conversations.draw(), 1, timeout=READY_S)
        meet(*self.servers.values())

    def _start(self, name: str) -> SGLangServer:
        """Start a server with policies of its own; it finds on its disk what an earlier one of its name left."""
        self._n_starts += 1
        prefetch, write = self._random.choice(PREFETCH), self._random.choice(WRITE)
        if self._n_starts <= len(FIRST_POLICIES):
            prefetch, write = FIRST_POLICIES[name]
        print(f"{name} starts with {prefetch} and {write}")
        settings = {
            "node_id": name,
            "join": [self._join],
            "pool_size": "8MiB",
            "disk_path": str(self._folder / f"{name}-disk"),
            "disk_size": "256MiB",
        }
        self._from_storage[name] = 0
        return hicache_server(
            self._folder / f"{name}-{self._n_starts}.log",
            layout="page_first_direct",
            settings=settings,
            options=["--hicache-storage-prefetch-policy", prefetch, "--hicache-write-policy", write],
            environment=INJECTED,
        )

    def _right_answer(self, prompt: list[int]) -> list[int]:
        key = (self._version, tuple(prompt))
        if key not in self._right:
            self._right[key] = self._alone.generate(prompt, N_TOKENS, timeout=DEADLINE_S)["output_ids"]
        return self._right[key]

    def ask(self, names: list[str]) -> None:
        """Ask a few servers at once for turns of conversations; each answer is right, and comes by the deadline."""
        asked = [(name, self._conversations.draw()) for name in names]
        right = [self._right_answer(prompt) for _, prompt in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(
                pool.map(
                    lambda one: self.servers[one[0]].generate(one[1], N_TOKENS, timeout=DEADLINE_S), asked
                )
            )
        for (name, prompt), ids, answer in zip(asked, right, answers, strict=True):
            assert answer["output_ids"] == ids, (name, len(prompt), cached(answer), self.events)
            came = cached(answer)
            self._from_storage[name] += came["storage"]
            self.tokens["asked"] += len(prompt)
            self.tokens["device"] += came["all"] - came["host"] - came["storage"]
            self.tokens.update(host=came["host"], storage=came["storage"])

    def hang_up(self) -> None:
        """Ask for an answer, and leave before it is there."""
        server = self._random.choice(list(self.servers.values()))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        body = {"input_ids": self._conversations.draw(), "sampling_params": {"max_new_tokens": 400}}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(self._random.choice([0.0, 0.02, 0.2]))  # a client's patience; nothing waits for it
        connection.close()

    def stand_still(self) -> None:
        """Halt one; the other one serves meanwhile, and so does this one when it goes on."""
        name, other = self._random.sample(sorted(self.servers), 2)
        self.servers[name].stop()
        try:
            for _ in range(self._random.randrange(1, 8)):
                self.ask([other])
        finally:
            self.servers[name].resume()
        self.ask([name])

    def die(self) -> None:
        """Kill one; the other one serves meanwhile, and the next of its name finds its disk."""
        name, other = self._random.sample(sorted(self.servers), 2)
        self.check(name)
        self.servers[name].kill()
        self.ask([other])
        self.servers[name] = self._start(name)
        self.ask([other, other])
        self.servers[name].wait_until_ready()
        self._give_weights(self.servers[name])
        meet(*self.servers.values())

    def replace_weights(self) -> None:
        """Replace them one server after the other: what has the new ones finds nothing of the old."""
        (self._version,) = set(self._weights) - {self._version}
        self._give_weights(self._alone)
        for name in self._random.sample(sorted(self.servers), 2):
            self._give_weights(self.servers[name])
            self.ask([name, name])

    def _give_weights(self, server: SGLangServer) -> None:
        server.update_weights(self._weights[self._version], self._version)

    def step(self) -> None:
        """Do the next thing of a round of them all, whose order is random."""
        if not self._to_come:
            self._to_come = [event for event, n in EVENTS.items() for _ in range(n)]
            self._random.shuffle(self._to_come)
        event = self._to_come.pop()
        self.events[event] += 1
        if event == "ask":
            self.ask(self._random.choices(sorted(self.servers), k=self._random.randrange(1, 4)))
        elif event == "hang up":
            self.hang_up()
        elif event == "stand still":
            self.stand_still()
        elif event == "die":
            self.die()
        else:
            self.replace_weights()

    def check(self, name: str) -> None:
        """Compare what SGLang had from storage with what the node says that it gave; no call has failed."""
        counters = self.servers[name].counters()
        given = sum(n for what, n in counters.items() if what.startswith("p2pkv_fetched_pages_total"))
        assert self._from_storage[name] <= given * PAGE, (name, self._from_storage, given)
        assert not [what for what in counters if what.startswith("p2pkv_failed_calls_total")], name

    def end(self) -> None:
        """See that no request is under way any more, no block lost, and that storage still serves."""
        for name, server in self.servers.items():
            server.flush()  # which SGLang refuses as long as it has a request
            self.ask([name])
            self.check(name)

    def close(self) -> None:
        """End all servers. Idempotent."""
        for server in (self._alone, *self.servers.values()):
            server.resume()
            server.kill()


@pytest.fixture
def soak(tmp_path: Path, other_weights: Path) -> Iterator[Soak]:
    soak = Soak(tmp_path, other_weights)
    try:
        soak.wait_until_ready()
        yield soak
    finally:
        soak.close()


def test_outputs_are_right_whatever_goes_wrong(soak: Soak) -> None:
    until = time.monotonic() + SOAK_S
    while time.monotonic() < until:
        soak.step()
    soak.end()
    asked = soak.tokens.pop("asked")
    print(dict(soak.events), {where: f"{n / asked:.0%}" for where, n in soak.tokens.items()}, "of", asked)
    assert soak.tokens["storage"] > 0
    eventually(
        lambda: all(server.counters()["p2pkv_members"] == 2 for server in soak.servers.values()), NOTICED_S
    )
