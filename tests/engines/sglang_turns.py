"""Conversations of many turns on two SGLang servers, with p2pkv, SGLang's ``file`` backend and no storage: run by hand.

``python tests/engines/sglang_turns.py none file p2pkv`` starts two servers with each in turn, and sends every
conversation's turns to one and the other of them alternately, as a router without affinity does. It prints where the
prompts' tokens came from and how long the first token took, and ends with an error unless all answers are the same.
``file`` is a folder that both servers have, in memory where ``/dev/shm`` is. ``P2PKV_TURNS`` is 10 unless it is set. A
turn is longer than the 256 tokens below which SGLang looks nothing up.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "support"), str(_TESTS / "engines"), str(_TESTS.parent)]

from sglang_prompts import PAGE, cached, meet  # noqa: E402
from sglang_server import HICACHE, SGLangServer, hicache_server, lasting_port  # noqa: E402

N_CONVERSATIONS = 4
N_TURNS = int(os.environ.get("P2PKV_TURNS", "10"))
SYSTEM_TOKENS, TURN_TOKENS, N_TOKENS = 32 * PAGE, 20 * PAGE, 8
LAYOUT = "page_first_direct"

Pair = tuple[SGLangServer, SGLangServer]


@dataclass(slots=True)
class Seen:
    """What became of all turns with one kind of storage."""

    answers: list[list[int]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)


def without(folder: Path) -> Pair:
    options = [*HICACHE, "--hicache-mem-layout", LAYOUT]
    return SGLangServer(folder / "none-1.log", options), SGLangServer(folder / "none-2.log", options)


def with_file(folder: Path) -> Pair:
    options = [*HICACHE, "--hicache-mem-layout", LAYOUT, "--hicache-storage-backend", "file"]
    where = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "pages")}
    first, second = (SGLangServer(folder / f"file-{i}.log", options, environment=where) for i in (1, 2))
    return first, second


def with_p2pkv(folder: Path) -> Pair:
    join = f"127.0.0.1:{lasting_port()}"
    first, second = (
        hicache_server(
            folder / f"{name}.log",
            layout=LAYOUT,
            settings={"node_id": name, "join": [join], "pool_size": "128MiB"},
        )
        for name in ("first", "second")
    )
    return first, second


STORAGES: dict[str, Callable[[Path], Pair]] = {"none": without, "file": with_file, "p2pkv": with_p2pkv}


def ask(server: SGLangServer, prompt: list[int], seen: Seen) -> None:
    """Have ``server`` answer, and note when its first token came."""
    sampling = {"temperature": 0, "max_new_tokens": N_TOKENS, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    lines: list[bytes] = []
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"HTTP {response.status}: {response.read(500)!r}; see {server.log}")
    for line in response:
        if line.startswith(b"data: {"):
            if not lines:
                seen.first_s.append(time.monotonic() - began)
            lines.append(line)
    connection.close()
    answer = json.loads(lines[-1].removeprefix(b"data: "))
    came = cached(answer)
    seen.answers.append(list(answer["output_ids"]))
    seen.tokens.update(
        prompt=len(prompt),
        storage=came["storage"],
        host=came["host"],
        device=came["all"] - came["storage"] - came["host"],
    )


def run(pair: Pair) -> Seen:
    """Hold all conversations, a turn of each at a time."""
    seen = Seen()
    system = [Random(0).randrange(300, 4000) for _ in range(SYSTEM_TOKENS)]
    spoken = [Random(i + 1) for i in range(N_CONVERSATIONS)]
    prompts = [list(system) for _ in spoken]
    for turn in range(N_TURNS):
        for i, (random, prompt) in enumerate(zip(spoken, prompts, strict=True)):
            prompt += [random.randrange(300, 4000) for _ in range(TURN_TOKENS)]
            ask(pair[(turn + i) % 2], prompt, seen)
    return seen


def main(names: list[str]) -> None:
    found: dict[str, Seen] = {}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in names:
        with tempfile.TemporaryDirectory(dir=memory) as folder, ExitStack() as undo:
            pair = STORAGES[name](Path(folder))
            for server in pair:
                undo.callback(server.kill)
            for server in pair:
                server.wait_until_ready()
            if name == "p2pkv":
                meet(*pair)
            found[name] = run(pair)
    print("storage  first token, ms: median    p90     from device   host   storage  computed")
    for name, seen in found.items():
        total = seen.tokens["prompt"]
        shares = [seen.tokens[where] / total for where in ("device", "host", "storage")]
        times = statistics.quantiles(seen.first_s, n=10)
        print(
            f"{name:8} {statistics.median(seen.first_s) * 1e3:24.0f} {times[8] * 1e3:6.0f} "
            + "".join(f"{share:12.0%}" for share in [*shares, 1 - sum(shares)])
        )
    if any(seen.answers != found[names[0]].answers for seen in found.values()):
        sys.exit("the answers are not the same")
    print(f"{len(found[names[0]].answers)} answers, the same with each")


if __name__ == "__main__":
    main(sys.argv[1:] or list(STORAGES))
