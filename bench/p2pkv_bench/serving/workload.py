"""What a serving benchmark asks, and when: random prompts or a trace of prefix hashes; Poisson or burst arrivals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from p2pkv.errors import ConfigError
from p2pkv_bench.traces import read_trace

_WORDS = ("page", "pool", "peer", "span", "shard", "ring", "slot", "node", "boot", "word", "lease", "owner")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: ``at`` is seconds from the beginning of its round."""

    at: float
    prompt: str
    n_new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are made. ``block`` is the bytes of text that stand for one hash of a trace."""

    rate: float
    """Requests a second, on average."""
    n_requests: int
    burst: int = 1
    """Requests that arrive at once; 1: each by itself, as a Poisson process."""
    prompt_bytes: int = 256
    shared_bytes: int = 128
    """Of a random prompt: the beginning, which it shares with a tenth of the others."""
    n_new: int = 16
    trace: Path | None = None
    block: int = 64
    output_share: float = 0.05
    """Of the tokens that a trace's requests generate: a small model on a CPU is slower than the traced one."""
    max_prompt_bytes: int = 1500
    seed: int = 1


def arrivals(load: Load, round_number: int, salt: str) -> list[Arrival]:
    """Make the requests of a round; the same for the same ``round_number``, but for ``salt`` at the beginning.

    With a salt of its own no target finds what another one has left in the caches.
    """
    chooser = random.Random(load.seed * 1_000_003 + round_number)  # noqa: S311 - no secret
    made = list(_traced(load, round_number) if load.trace is not None else _random_prompts(load, chooser))
    times = _times(load, chooser, len(made))
    return [replace(one, at=at, prompt=salt + one.prompt) for one, at in zip(made, times, strict=True)]


def _times(load: Load, chooser: random.Random, n: int) -> list[float]:
    times: list[float] = []
    now = 0.0
    while len(times) < n:
        now += chooser.expovariate(load.rate / load.burst)
        times += [now] * min(load.burst, n - len(times))
    return times


def _random_prompts(load: Load, chooser: random.Random) -> Iterator[Arrival]:
    shared = [_text(chooser, load.shared_bytes) for _ in range(max(1, load.n_requests // 10))]
    for _ in range(load.n_requests):
        prompt = chooser.choice(shared) + _text(chooser, load.prompt_bytes - load.shared_bytes)
        yield Arrival(0.0, prompt, load.n_new)


def _traced(load: Load, round_number: int) -> Iterator[Arrival]:
    """Take the round's part of a trace: each hash becomes a block of text, always the same."""
    assert load.trace is not None
    first = round_number * load.n_requests
    n_made = 0
    for one in itertools.islice(read_trace(load.trace), first, first + load.n_requests):
        prompt = "".join(_block(hash_id, load.block) for hash_id in one.hash_ids)
        n_new = max(1, round(one.output_length * load.output_share))
        yield Arrival(0.0, prompt[: load.max_prompt_bytes], n_new)
        n_made += 1
    if n_made < load.n_requests:
        raise ConfigError(
            f"the trace {load.trace} has no {load.n_requests} requests for round {round_number}"
        )


def _block(hash_id: int, nbytes: int) -> str:
    chooser = random.Random(hash_id)  # noqa: S311 - no secret
    return _text(chooser, nbytes)


def _text(chooser: random.Random, nbytes: int) -> str:
    text = ""
    while len(text) < nbytes:
        text += chooser.choice(_WORDS) + str(chooser.randrange(1000)) + " "
    return text[:nbytes]
