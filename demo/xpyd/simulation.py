"""The router's policies in simulation: its own classes before prefills that are only reckoned.

    python -m demo.xpyd.simulation --trace TRACE.jsonl
    python -m demo.xpyd.simulation --agents 120

A prefill computes its prompts one after another, each page that nobody has at its rate; pages that another one has are
fetched for a share of that. Pages lie where they were computed until they are the ones longest unused. With
``--unsteady`` prefills are faster and slower by chance, as on machines that others use too; with ``--long-context`` a
token takes the longer the more stand before it. With ``--routers`` requests are dealt out by chance to several routers,
which hear of the engines every three seconds, and of each other by their own messages. Left out: batches, chunked
prefill, links that are shared, what engines keep in memory of their own, and decodes.

With ``--exact`` one more row is of who knows what every prompt takes that waits anywhere, and takes the one that is
done soonest. ``worked`` is what the time would be if nobody waited.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from demo.xpyd.simulated_routers import Apart, SimulatedRouter, SimulatedRouters
from demo.xpyd.traces import BLOCK, Request, make_agents, read_trace
from p2pkv.instances.heartbeat import Instance, Role
from p2pkv_proxy.costs import work_of
from p2pkv_proxy.held import Held, Place
from p2pkv_proxy.policies import POLICIES
from p2pkv_proxy.prompts import BLOCK_TOKENS, Prompt
from p2pkv_proxy.shared_load import SHARE_S
from p2pkv_proxy.tracked import Attempt, Tracked

_TOKEN_S = 0.03
"""Between two tokens of a decode; only agents wait for them."""
_MOOD_S = 8.0
"""An unsteady prefill has one rate for so many seconds on average."""
_DECODES = ("kv_space",)
"""Policies that say nothing of prefills."""
_EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """These are the times and sizes that the simulation reckons with."""

    n_prefills: int = 8
    rate: float = 7000.0
    """Tokens a second that a prefill computes."""
    n_slow: int = 0
    """Prefills that compute half as many."""
    n_blocks: int = 2000
    """That each one's pool holds."""
    is_shared: bool = True
    """Whether pages can be fetched from others."""
    fetch_share: float = 0.05
    """A token from another one takes this share of the time of a computed one; from the own pool it takes none."""
    unsteady: float = 0.0
    """The deviation of the logarithm of a prefill's rate: once for some seconds, and once more for every prompt."""
    long_context: float = math.inf
    """So many tokens before a token double what it takes."""
    apart: Apart = field(default_factory=Apart)


@dataclass(frozen=True, slots=True)
class _Work:
    """It says what a prompt takes at one prefill now: tokens by where their pages are, and seconds."""

    own: int
    fetched: int
    computed: int
    seconds: float


@dataclass(slots=True)
class _Job:
    number: int
    request: Request
    tracked: Tracked
    attempt: Attempt
    came: float
    after: list[int] = field(default_factory=list)


class _Prefill:
    """One prefill: its queue, its pool, and how fast it is."""

    def __init__(self, number: int, rate: float, unsteady: float) -> None:
        self.number = number
        self.id = f"p{number}"
        self._rate = rate
        self._unsteady = unsteady
        self._chooser = random.Random(self.id)  # noqa: S311 - no secret
        self._mood, self._mood_ends = 1.0, 0.0
        self.queue: deque[_Job] = deque()
        self.is_busy = False
        self.ends = 0.0
        """When what it is at will be done."""
        self.pool: OrderedDict[int, None] = OrderedDict()

    def rate(self, now: float, number: int) -> float:
        """Return the tokens that it computes a second, of the request of that number: the same for every policy."""
        if not self._unsteady:
            return self._rate
        while now >= self._mood_ends:
            self._mood = self._draw(self._chooser)
            self._mood_ends += self._chooser.expovariate(1 / _MOOD_S)
        return self._rate * self._mood * self._draw(random.Random(number))  # noqa: S311 - no secret

    def _draw(self, chooser: random.Random) -> float:
        return math.exp(chooser.gauss(-(self._unsteady**2) / 2, self._unsteady))


class _Parts(dict[int, list[bytes]]):
    """The names of a block's parts, which a session's next prompt has again."""

    def __missing__(self, block: int) -> list[bytes]:
        n = BLOCK // BLOCK_TOKENS
        self[block] = [(block * n + part).to_bytes(8, "little") for part in range(n)]
        return self[block]


class Simulation:
    """One policy before the world. Times are simulated seconds."""

    def __init__(self, name: str, world: World, requests: Sequence[Request]) -> None:
        self.now = 0.0
        self._world = world
        self._requests = requests
        self._prefills: dict[str, _Prefill] = {}
        instances = []
        for number in range(world.n_prefills):
            rate = world.rate / 2 if number < world.n_slow else world.rate
            prefill = _Prefill(number, rate, world.unsteady)
            self._prefills[prefill.id] = prefill
            url = f"http://10.0.0.{number}:1"
            instances.append(Instance(url=url, role=Role.PREFILL, id=prefill.id, node_id=prefill.id))
        self._name = name
        policy = "least_loaded" if name == _EXACT else name  # which then is not asked
        self._routers = SimulatedRouters(policy, instances, world.apart, lambda: self.now)
        self._dealer = random.Random(1)  # noqa: S311 - no secret
        self._owners: dict[int, _Prefill] = {}
        self._parts = _Parts()
        self._events: list[tuple[float, int, str, int]] = []
        self._order = itertools.count()
        self._next_turns: dict[int, int] = {}
        self.first_token: list[float] = []
        self.working: list[float] = []
        """It has, of the time to each first token, that in which it was worked on."""
        self.tokens = {"own": 0, "fetched": 0, "computed": 0}

    def run(self) -> None:
        """Run to the last request's first token."""
        seen: set[int] = set()
        before: dict[int, int] = {}
        for number, request in enumerate(self._requests):
            if request.session >= 0 and request.session in seen:
                self._next_turns[before[request.session]] = number
            else:
                self._push(request.at, "arrives", number)
            seen.add(request.session)
            before[request.session] = number
        while self._events:
            self.now, _, what, number = heapq.heappop(self._events)
            self._routers.until(self.now, self._queues)
            if what == "arrives":
                self._arrives(number)
            else:
                self._done(self._prefills[f"p{number}"])

    def _push(self, at: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, number))

    def _queues(self) -> dict[str, int]:
        return {prefill.id: len(prefill.queue) for prefill in self._prefills.values()}

    def _arrives(self, number: int) -> None:
        request = self._requests[number]
        router = self._dealer.choice(self._routers.each)
        prompt = self._prompt(request, router)
        if self._name == _EXACT:
            chosen = router.tracked(self._soonest(number).id)
        else:
            chosen = router.policy.choose(prompt, router.candidates).tracked
        work = work_of(prompt, chosen.id, chosen.instance.node_id)
        n_tokens = prompt.n_to_compute + 1 if prompt.holdings is not None else round(work.n_compute)
        attempt = chosen.begin(n_tokens, self.now, lambda: None, work=work)
        prefill = self._prefills[chosen.id]
        prefill.queue.append(_Job(number, request, chosen, attempt, self.now))
        if not prefill.is_busy:
            self._start(prefill)

    def _prompt(self, request: Request, router: SimulatedRouter) -> Prompt:
        whole = request.blocks[: request.n_tokens // BLOCK]
        blocks = list(itertools.chain.from_iterable(map(self._parts.__getitem__, whole)))
        prompt = Prompt(
            "", ["x"], None, is_stream=True, max_tokens=1, n_tokens=request.n_tokens, _blocks=blocks
        )
        prompt.session = str(request.session) if request.session >= 0 else ""
        if self._world.is_shared and router.policy.wants_holdings:
            owners = [self._owners.get(block) for block in whole]
            places = [Place(owner.id) if owner is not None else None for owner in owners]
            prompt.holdings = Held.of(places, BLOCK)
        return prompt

    def _soonest(self, number: int) -> _Prefill:
        """Return the prefill that would be done first with a request, by what all that is before it takes."""

        def done(prefill: _Prefill) -> tuple[float, int]:
            waiting = itertools.islice(prefill.queue, 1, None)
            numbers = [*(job.number for job in waiting), number]
            seconds = sum(self._work(prefill, each).seconds for each in numbers)
            # of those that are as good the one with the fewest pages: else one would have all of them at first
            return max(0.0, prefill.ends - self.now) + seconds, len(prefill.pool)

        return min(self._prefills.values(), key=done)

    def _work(self, prefill: _Prefill, number: int) -> _Work:
        request = self._requests[number]
        own = fetched = 0
        for block in request.blocks[: request.n_tokens // BLOCK]:
            if block in prefill.pool:
                own += BLOCK
            elif self._world.is_shared and block in self._owners:
                fetched += BLOCK
            else:
                break
        computed = max(1, request.n_tokens - own - fetched)
        around = request.n_tokens - computed / 2  # where the computed ones stand, on average
        work = computed * (1 + around / self._world.long_context) + fetched * self._world.fetch_share
        return _Work(own, fetched, computed, work / prefill.rate(self.now, number))

    def _begin(self, prefill: _Prefill, job: _Job) -> float:
        """Count a prompt's work, and return its seconds: what is where now, whatever was thought when it came."""
        work = self._work(prefill, job.number)
        for name, n_tokens in (("own", work.own), ("fetched", work.fetched), ("computed", work.computed)):
            self.tokens[name] += n_tokens
        self.working.append(work.seconds)
        return work.seconds

    def _start(self, prefill: _Prefill) -> None:
        prefill.is_busy = True
        prefill.ends = self.now + self._begin(prefill, prefill.queue[0])
        self._push(prefill.ends, "done", prefill.number)

    def _done(self, prefill: _Prefill) -> None:
        job = prefill.queue.popleft()
        prefill.is_busy = False
        tracked = job.tracked
        tracked.answered(job.attempt, self.now)
        tracked.completed(job.attempt, self.now)
        tracked.end(job.attempt, self.now)
        self.first_token.append(self.now - job.came)
        self._keep(prefill, job.request)
        if (turn := self._next_turns.get(job.number)) is not None:
            self._push(self.now + job.request.n_new * _TOKEN_S + self._requests[turn].at, "arrives", turn)
        if prefill.queue:
            self._start(prefill)

    def _keep(self, prefill: _Prefill, request: Request) -> None:
        """Note the prompt's pages as used, and those that were computed as this prefill's."""
        for block in request.blocks[: request.n_tokens // BLOCK]:
            owner = self._owners.get(block) if self._world.is_shared else None
            holder = owner if owner is not None else prefill
            holder.pool[block] = None
            holder.pool.move_to_end(block)
            self._owners.setdefault(block, holder)
            if len(holder.pool) > self._world.n_blocks:
                gone, _ = holder.pool.popitem(last=False)
                if self._owners.get(gone) is holder:
                    del self._owners[gone]


def table(world: World, requests: Sequence[Request], names: Sequence[str], title: str) -> Table:
    """Run every policy, and compare their times with the first one's."""
    shown = Table("policy", title=title, title_justify="left")
    for column in ("p50, s", "p90, s", "p99, s", "worked, p90", f"p90 of {names[0]}", "own", "fetched"):
        shown.add_column(column, justify="right")
    first = 0.0
    for name in names:
        simulation = Simulation(name, world, requests)
        simulation.run()
        p50, p90, p99 = np.percentile(simulation.first_token, (50, 90, 99)).tolist()
        first = first or p90
        total = sum(simulation.tokens.values())
        shares = [f"{simulation.tokens[kind] / total:.0%}" for kind in ("own", "fetched")]
        worked = f"{np.percentile(simulation.working, 90):.2f}"
        times = f"{p50:.2f}", f"{p90:.2f}", f"{p99:.2f}", worked, f"{first / p90:.2f}x better"
        shown.add_row(name, *times, *shares)
    return shown


def main() -> int:
    """Print a table for every trace that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m demo.xpyd.simulation", description=__doc__)
    known = [name for name in POLICIES if name not in _DECODES]
    parser.add_argument("--policies", default=",".join(known), help="the first is the one to compare with")
    parser.add_argument("--exact", action="store_true", help="show who knows everything, too")
    parser.add_argument("--trace", type=Path, help="JSON lines with timestamp, input_length and hash_ids")
    parser.add_argument("--requests", type=int, default=2500, help="of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as the trace")
    parser.add_argument(
        "--agents", type=int, default=0, metavar="N", help="sessions of agents that are made up"
    )
    parser.add_argument("--agents-a-second", type=float, default=1.0)
    parser.add_argument("--prefills", type=int, default=8)
    parser.add_argument("--slow", type=int, default=0, help="prefills with half the rate")
    parser.add_argument("--rate", type=float, default=7000.0, help="tokens a second of a prefill")
    parser.add_argument("--fetch-share", type=float, default=0.05, help="of the time to compute a token")
    parser.add_argument(
        "--unsteady", type=float, default=0.0, help="deviation of the logarithm of a prefill's rate"
    )
    parser.add_argument(
        "--long-context",
        type=float,
        default=math.inf,
        metavar="TOKENS",
        help="before a token, that double its time",
    )
    parser.add_argument("--apart", action="store_true", help="pages are not shared")
    parser.add_argument("--routers", type=int, default=1, help="beside each other")
    parser.add_argument("--silent", action="store_true", help="routers tell each other nothing")
    parser.add_argument(
        "--share", type=float, default=SHARE_S, metavar="SECONDS", help="between what they tell each other"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    world = World(
        n_prefills=options.prefills,
        n_slow=options.slow,
        rate=options.rate,
        is_shared=not options.apart,
        fetch_share=options.fetch_share,
        unsteady=options.unsteady,
        long_context=options.long_context,
        apart=Apart(n_routers=options.routers, tells=not options.silent, share_s=options.share),
    )
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    loads = []
    if options.trace is not None:
        trace = read_trace(options.trace, options.requests, speed=options.speed, seed=options.seed)
        loads.append((f"{len(trace)} requests of {options.trace.name}", trace))
    if options.agents:
        agents = make_agents(options.agents, per_second=options.agents_a_second, seed=options.seed)
        loads.append((f"{options.agents} agents of {len(agents) // options.agents} turns", agents))
    if not loads:
        parser.error("name a --trace, or a number of --agents")
    for title, requests in loads:
        names = [*options.policies.split(","), *((_EXACT,) if options.exact else ())]
        console.print(table(world, requests, names, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
