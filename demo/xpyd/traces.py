"""Requests for simulations: a trace from a file, or agents that are made up.

Each stands for a prompt by its blocks of 512 tokens: prompts with the same blocks at their beginnings begin alike.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from p2pkv_bench import traces

BLOCK = 512
TURNS = 33
INPUT_A_OUTPUT = 131
"""Input tokens for each output token of an agent's session."""
_KINDS = 4
_SHARED_BLOCKS = 8
"""The system prompt and the tools of each kind of agent are so many blocks."""
_TASK_TOKENS = 2000
_ADDED_TOKENS = 1500
"""Each turn adds so many on average: the answer, and what the tool said."""
_THINK_S = 4.0
"""From an answer to the next turn, on average: the tool's time."""
_STAMP_S = 3.0
"""A trace's stamps are so far apart; requests between two are spread."""


@dataclass(frozen=True, slots=True)
class Request:
    """``at`` in seconds; of a session's later turns the time from the answer before."""

    at: float
    n_tokens: int
    n_new: int
    blocks: tuple[int, ...]
    session: int = -1
    """-1: it stands for itself."""


def read_trace(path: Path, n_requests: int, *, speed: float, seed: int) -> list[Request]:
    """Return the first requests of a trace; ``speed`` is how many times as fast they come."""
    chooser = random.Random(seed)  # noqa: S311 - no secret
    requests = []
    for one in itertools.islice(traces.read_trace(path), n_requests):
        at = (one.timestamp / 1000 + chooser.random() * _STAMP_S) / speed
        requests.append(Request(at, one.input_length, one.output_length, one.hash_ids))
    return sorted(requests, key=lambda request: request.at)


def make_agents(n_sessions: int, *, per_second: float, seed: int) -> list[Request]:
    """Return the turns of agents that start at random, ``per_second`` on average, turn after turn of each session.

    Every turn's prompt is all of the turns before it and what was added since; agents of a kind begin alike.
    """
    chooser = random.Random(seed)  # noqa: S311 - no secret
    fresh = itertools.count(_KINDS * _SHARED_BLOCKS)
    requests, now = [], 0.0
    for session in range(n_sessions):
        now += chooser.expovariate(per_second)
        first = chooser.randrange(_KINDS) * _SHARED_BLOCKS
        blocks = list(range(first, first + _SHARED_BLOCKS))
        n_tokens = _SHARED_BLOCKS * BLOCK + round(_TASK_TOKENS * chooser.uniform(0.5, 1.5))
        for turn in range(TURNS):
            blocks += [next(fresh) for _ in range(-(-n_tokens // BLOCK) - len(blocks))]
            at = chooser.expovariate(1 / _THINK_S) if turn else now
            requests.append(Request(at, n_tokens, max(1, n_tokens // INPUT_A_OUTPUT), tuple(blocks), session))
            # the last block is not full: with more tokens it is another one
            del blocks[n_tokens // BLOCK :]
            n_tokens += round(chooser.expovariate(1 / _ADDED_TOKENS)) + 1
    return requests
