"""Fetching or recomputing by measurement costs little more than the better of always and never: an oracle knows.

A simulated world, whose times only it knows: owners with memory and disks whose speeds drift and jump, that die for a
while, and an engine whose speed does the same, with attention that grows with the position. Requests come one after
another, and each is taken three times under the same conditions: by the policy, by one that fetches all, by one that
fetches nothing. After a warm-up the policy's sum may be a tenth above the better of these two.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.metrics import Metrics
from p2pkv.recompute.hits import Hits
from p2pkv.recompute.policy import Choice, Decision, Policy, Reason
from p2pkv.recompute.rates import Source

N_REQUESTS, WARM_UP = 800, 100
MOST = 1.1
TIMEOUT = 1.0
"""Seconds that a fetch from a dead owner takes."""


@dataclass
class Pace:
    """A speed that drifts, and now and then jumps."""

    chance: random.Random
    value: float
    low: float
    high: float
    jumps: float
    """Chance of a jump with each request."""

    def step(self) -> None:
        self.value *= math.exp(self.chance.gauss(0, 0.01))
        if self.chance.random() < self.jumps:
            self.value = self.low * (self.high / self.low) ** self.chance.random()
        self.value = min(max(self.value, self.low), self.high)


class World:
    """What things really take."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.jumps = chance.choice([0.0, 0.001, 0.002])
        self.noise = chance.choice([0.0, 0.05, 0.15])
        self.page_tokens = chance.choice([16, 64, 256])
        self.page_nbytes = self.page_tokens * chance.choice([4096, 32768, 131072])
        # so that what is fetched takes a twentieth to twenty times of what is computed
        self.prefill = Pace(chance, 1e-4, 2e-5, 5e-4, self.jumps)
        self.quadratic = chance.choice([0.0, 1e-9, 2e-8])
        self.step_s = chance.choice([0.0, 0.005])
        typical = 2 * self.page_nbytes / self.page_tokens / 1e-4
        self.n_owners = chance.randint(1, 5)
        self.paces = {
            (owner, is_on_disk): self._pace(typical / (2 if is_on_disk else 1))
            for owner in range(1, self.n_owners + 1)
            for is_on_disk in (False, True)
        }
        self.fixed = {key: chance.choice([2e-4, 2e-3]) for key in self.paces}
        self.network = Pace(chance, 1.0, 0.1, 10.0, self.jumps)  # of all owners at once
        self.dead: dict[int, int] = {}  # owner -> for how many requests more
        self.deaths = chance.choice([0.0, 0.002])

    def _pace(self, typical: float) -> Pace:
        speed = typical * 20 ** self.chance.uniform(-1, 1)
        return Pace(self.chance, speed, typical / 20, typical * 20, self.jumps)

    def step(self) -> None:
        for pace in (self.prefill, self.network, *self.paces.values()):
            pace.step()
        self.dead = {owner: left - 1 for owner, left in self.dead.items() if left > 1}
        if self.chance.random() < self.deaths:
            self.dead[self.chance.randint(1, self.n_owners)] = self.chance.randint(3, 15)

    def request(self) -> Hits:
        n_pages = self.chance.randint(1, 60)
        first = self.chance.choice([0, 0, self.page_tokens * self.chance.randint(1, 20)])
        sources = [
            Source(*key, "tcp")
            for key in self.chance.sample(
                list(self.paces), min(len(self.paces), number_of_sources(self.chance))
            )
        ]
        ends = sorted(self.chance.randint(0, n_pages) for _ in sources[1:])
        of_page = np.searchsorted(ends, np.arange(n_pages), side="right")
        rest = self.chance.randint(1, 4 * self.page_tokens)
        n_tokens = first + n_pages * self.page_tokens + rest
        nbytes = np.full(n_pages, self.page_nbytes, np.int64)
        return Hits(sources, of_page, nbytes, self.page_tokens, first, n_tokens)

    def noisy(self) -> float:
        return math.exp(self.chance.gauss(0, self.noise))

    def fetching(self, hits: Hits, n: int, noise: float, limit: float | None) -> tuple[float, np.ndarray]:
        """Return how long the first ``n`` pages take, given up at ``limit``, and which don't come."""
        by_owner: dict[int, float] = {}
        failed = np.zeros(n, bool)
        for number, source in enumerate(hits.sources):
            of_it = hits.of_page[:n] == number
            nbytes = int(hits.nbytes[:n][of_it].sum())
            if not nbytes:
                continue
            key = (source.owner, source.is_on_disk)
            seconds = self.fixed[key] + nbytes / self.paces[key].value / self.network.value
            if source.owner in self.dead:
                failed |= of_it
                seconds = TIMEOUT
            by_owner[source.owner] = by_owner.get(source.owner, 0.0) + seconds * noise
            if limit is not None and by_owner[source.owner] > limit:
                failed |= of_it
        taken = max(by_owner.values(), default=0.0)
        return taken if limit is None else min(taken, limit), failed

    def computing(self, first: int, n_tokens: int) -> float:
        return (
            self.step_s + self.prefill.value * n_tokens + self.quadratic * n_tokens * (first + n_tokens / 2)
        )


def number_of_sources(chance: random.Random) -> int:
    """Return of how many sources a prompt's pages are: mostly of one."""
    return chance.choice([1, 1, 1, 2, 3])


def take(
    world: World, hits: Hits, n: int, noise: tuple[float, float], limit: float | None = None
) -> tuple[float, float, int, np.ndarray]:
    """Return the seconds of the fetch and of the rest, where the rest begins, and what failed."""
    fetch_s, failed = world.fetching(hits, n, noise[0], limit)
    n_here = int(np.argmax(failed)) if failed.any() else n
    first = hits.first_token + n_here * hits.page_tokens
    computed_s = world.computing(first, hits.n_tokens - first)
    return fetch_s, computed_s * noise[1], first, failed


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    world = World(chance)
    metrics = Metrics()
    now = 0.0
    policy = Policy("measured", metrics, clock=lambda: now)
    sums = {"measured": 0.0, "always": 0.0, "never": 0.0}
    story: list[str] = []
    for number in range(N_REQUESTS):
        world.step()
        hits, noise = world.request(), (world.noisy(), world.noisy())
        decision = policy.decide(hits)
        check(decision, hits, story)
        fetch_s, computed_s, first, failed = take(world, hits, decision.n_pages, noise, decision.limit_s)
        if decision.n_pages:
            policy.fetched(decision, fetch_s, failed)
        policy.computed(first, hits.n_tokens - first, computed_s)
        policy.settled(decision, fetch_s + computed_s)
        now += fetch_s + computed_s
        taken = {"measured": fetch_s + computed_s}
        for name, n in (("always", len(hits)), ("never", 0)):
            seconds = take(world, hits, n, noise)
            taken[name] = seconds[0] + seconds[1]
        tally["deaths felt"] += int(
            any(source.owner in world.dead for source in hits.sources) and failed.any()
        )
        tally["given up"] += int(failed.any())
        tally[decision.choice.value] += 1
        tally[decision.reason.value] += 1
        story.append(
            f"{number}: {decision.choice.value} {decision.n_pages}/{len(hits)} {decision.reason.value}, expected "
            f"{decision.seconds * 1e3:.1f}, " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in taken.items())
        )
        if number >= WARM_UP:
            for name, seconds_ in taken.items():
                sums[name] += seconds_
        if stop():
            return
    better = min(sums["always"], sums["never"])
    tally["worst per mille"] = max(tally["worst per mille"], int(1000 * sums["measured"] / better))
    tally["fetching pays"] += int(sums["always"] < sums["never"])
    tally["computing pays"] += int(sums["always"] >= sums["never"])
    tally["better than both"] += int(sums["measured"] < better)
    if sums["measured"] > MOST * better:
        worst = "\n".join(story[-40:])
        raise Broken(f"{sums} seconds: {sums['measured'] / better:.3f} of the better one\n{worst}")


def check(decision: Decision, hits: Hits, story: list[str]) -> None:
    """Raise `Broken` for a decision that says other than it does."""
    n, choice = decision.n_pages, decision.choice
    is_right = {
        Choice.RECOMPUTE: n == 0,
        Choice.FETCH_ALL: n == len(hits),
        Choice.FETCH_PART: 0 < n < len(hits),
    }
    if not 0 <= n <= len(hits) or not is_right[choice] or decision.seconds < 0:
        raise Broken("\n".join([f"{n} of {len(hits)} pages is not {choice}", *story[-5:]]))
    if decision.reason is Reason.UNMEASURED and n != len(hits):
        raise Broken(f"{n} of {len(hits)} pages are fetched although nothing is known")


HUNT = Hunt(
    "recompute",
    "Fetch or recompute by measurement takes at most a tenth more than the better of always and never",
    run,
    effects=(
        "fetch_all",
        "fetch_part",
        "recompute",
        "probe",
        "deaths felt",
        "given up",
        "fetching pays",
        "computing pays",
    ),
    enough=30,
)
