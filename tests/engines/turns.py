"""Conversations of many turns on two servers, and where their prompts' KV came from: for the scripts that compare.

Every conversation grows by a turn at a time behind one system prompt, and its turns go to one and the other server
alternately, as a router without affinity sends them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

PAGE = 16
N_CONVERSATIONS = 4
N_TURNS = int(os.environ.get("P2PKV_TURNS", "10"))
SYSTEM_TOKENS, TURN_TOKENS, N_TOKENS = 32 * PAGE, 20 * PAGE, 8
"""A turn is longer than the 256 tokens below which SGLang looks nothing up."""


@dataclass(slots=True)
class Seen:
    """What became of all turns with one kind of storage."""

    answers: list[list[int]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Of all prompts together as ``prompt``, and of those that came from somewhere by its name."""
    first_s: list[float] = field(default_factory=list)


Ask = Callable[[list[int], Seen], None]
"""Has a server answer a prompt, and notes what it answered and when its first token came."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that are ready, and what to do when all has been asked."""

    asks: tuple[Ask, Ask]
    count: Callable[[Seen], None]
    """Notes where the tokens came from, if that is not known with each answer."""


Start = Callable[[Path, ExitStack], Pair]
"""Starts a pair, which may write to a folder and is ended with the stack."""


def hold(pair: Pair) -> Seen:
    """Hold all conversations, a turn of each at a time."""
    seen = Seen()
    system = [Random(0).randrange(300, 4000) for _ in range(SYSTEM_TOKENS)]
    spoken = [Random(i + 1) for i in range(N_CONVERSATIONS)]
    prompts = [list(system) for _ in spoken]
    for turn in range(N_TURNS):
        for i, (random, prompt) in enumerate(zip(spoken, prompts, strict=True)):
            prompt += [random.randrange(300, 4000) for _ in range(TURN_TOKENS)]
            seen.tokens["prompt"] += len(prompt)
            pair.asks[(turn + i) % 2](prompt, seen)
    pair.count(seen)
    return seen


def compare(storages: Mapping[str, Start], names: Sequence[str], places: Sequence[str]) -> None:
    """Hold the conversations with each storage, and print what they were worth; end with an error if answers differ.

    ``places``: where a prompt's KV may have come from; the rest was computed. Folders are in memory where
    ``/dev/shm`` is.
    """
    found: dict[str, Seen] = {}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in names:
        with tempfile.TemporaryDirectory(dir=memory) as folder, ExitStack() as undo:
            found[name] = hold(storages[name](Path(folder), undo))
        show({name: found[name]}, places)
    if len(names) > 1:
        print("all together:")
        show(found, places)
    if any(seen.answers != found[names[0]].answers for seen in found.values()):
        sys.exit("the answers are not the same")
    print(f"{len(found[names[0]].answers)} answers, the same with each")


def show(found: Mapping[str, Seen], places: Sequence[str]) -> None:
    """Print a line of each."""
    print(
        "storage       first token, ms: median    p90 " + "".join(f"{p:>11}" for p in (*places, "computed"))
    )
    for name, seen in found.items():
        total = seen.tokens["prompt"]
        shares = [seen.tokens[place] / total for place in places]
        times = statistics.quantiles(seen.first_s, n=10)
        print(
            f"{name:13} {statistics.median(seen.first_s) * 1e3:23.0f} {times[8] * 1e3:6.0f} "
            + "".join(f"{share:11.0%}" for share in [*shares, 1 - sum(shares)]),
            flush=True,
        )
