"""What prompts cost until their first token, in seconds: learnt from what they have taken, as plain numbers.

A prompt's time is taken to be a sum: something for each request, for each token that the instance computes, and for
each that it fetches, by the place it comes from. After some prompts the sum is compared with what they took, and every
part is corrected by its share of the difference. So a slow link and a slow instance are told apart without anybody
measuring them by themselves; whoever does measure may set the numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pkv_proxy.held import Place
from p2pkv_proxy.prompts import Prompt

REQUEST_S = 0.002
COMPUTE_S = 1 / 5000
"""A token, before anything was measured: a guess."""
_FETCH_SHARE = {False: 0.05, True: 0.1}
_OWN_SHARE = 0.005
"""What a token from another node's memory, a disk, or the own node costs of a computed one, until it was measured.
Guesses."""
OWN = Place("")
"""The memory of the node that the instance itself has, whichever that is."""
_LEAST_STEP = 0.05
"""How much of a difference is believed at a time, after the first ones: rates change by minutes."""
_ALIKE = 0.1
"""Rates of instances that differ by less are taken for one: it is more likely noise, for which no page should move."""
_LEAST_RATIO, _MOST_RATIO = 0.1, 3.0
"""A machine that stood still for a moment says little of its rate."""
_STALE = 4
"""So many times as many windows as there are instances: after that without one of its own nobody knows how fast an
instance is. Else one that was slow once would be sent nothing, and never be looked at again."""
_LEAST_S, _MOST_S = 1e-8, 1.0
"""Of a token: who says otherwise, by answering at once or never, is believed no further."""
_MOST_PLACES = 4096
_ENOUGH = 8
"""Prompts whose times are looked at together, of an instance that is never idle."""


@dataclass(slots=True)
class Work:
    """What prompts ask of an instance until their first token, in tokens."""

    n_requests: int = 0
    n_compute: float = 0.0
    fetched: dict[Place, float] = field(default_factory=dict)
    """By where they are: :data:`OWN`, or elsewhere."""

    def add(self, other: Work) -> None:
        """Count another one's in."""
        self.n_requests += other.n_requests
        self.n_compute += other.n_compute
        for place, n_tokens in other.fetched.items():
            self.fetched[place] = self.fetched.get(place, 0.0) + n_tokens


def work_of(prompt: Prompt, instance_id: str, node_id: str) -> Work:
    """Return what a prompt would be for an instance. The last token is always computed."""
    if prompt.holdings is None:
        own = max(0, min(prompt.sent.get(instance_id, 0), prompt.n_tokens - 1))
        return Work(1, max(1, prompt.n_tokens - own), {OWN: own} if own else {})
    own_place = Place(node_id)
    fetched: dict[Place, float] = {
        OWN if place == own_place else place: n_tokens for place, n_tokens in prompt.holdings.tokens.items()
    }
    return Work(1, max(1, prompt.n_to_compute), fetched)


class Costs:
    """Seconds, by instance and by place. One event loop uses it."""

    def __init__(self) -> None:
        self.compute_s: dict[str, float] = {}
        """A computed token's, by instance, as it was learnt."""
        self.fetch_s: OrderedDict[Place, float] = OrderedDict()
        """A fetched token's, by where it comes from; those longest unused are forgotten."""
        self._request_s = REQUEST_S
        self._n_observed: dict[str, int] = {}
        self._last: dict[str, int] = {}  # the number of the last window of each instance
        self._n_windows = 0
        self._typical_s = COMPUTE_S

    def compute(self, instance_id: str) -> float:
        """Return what a computed token takes; of an instance not seen yet what it took elsewhere."""
        known, typical = self._learnt(instance_id), self._typical_s
        return known if abs(known / typical - 1) > _ALIKE else typical

    def fetch(self, place: Place) -> float:
        """Return what a token from there takes."""
        known = self.fetch_s.get(place)
        if known is not None:
            return known
        share = _OWN_SHARE if place == OWN else _FETCH_SHARE[place.is_on_disk]
        return self.compute("") * share

    def seconds(self, instance_id: str, work: Work) -> float:
        """Return what a piece of work takes, once it is begun."""
        return sum(self._parts(instance_id, work).values())

    def observe(self, instance_id: str, work: Work, seconds: float) -> None:
        """Learn from what a piece of work has taken."""
        parts, compute_s = self._parts(instance_id, work), self._learnt(instance_id)
        predicted = sum(parts.values())
        if predicted <= 0.0:
            return
        ratio = min(_MOST_RATIO, max(_LEAST_RATIO, seconds / predicted))

        n_before = 0 if self._is_stale(instance_id) else self._n_observed.get(instance_id, 0)
        self._n_windows += 1
        self._last[instance_id] = self._n_windows
        self._n_observed[instance_id] = n_before + 1
        step = max(_LEAST_STEP, 0.5 / (1 + n_before))

        def corrected(value: float, part: float) -> float:
            return min(_MOST_S, max(_LEAST_S, value * (1 + step * (ratio - 1) * part / predicted)))

        self._request_s = corrected(self._request_s, parts["request"])
        self.compute_s[instance_id] = corrected(compute_s, parts["compute"])
        self._sum_up()
        for place in work.fetched:
            self.fetch_s[place] = corrected(self.fetch(place), parts[place])
            self.fetch_s.move_to_end(place)
        while len(self.fetch_s) > _MOST_PLACES:
            self.fetch_s.popitem(last=False)

    def _learnt(self, instance_id: str) -> float:
        """Return what a token takes there, alike or not: corrected is this, or it would never leave the others."""
        known = None if self._is_stale(instance_id) else self.compute_s.get(instance_id)
        return known if known is not None else self._typical_s

    def _sum_up(self) -> None:
        """Take the mean of what is known, once for all that is asked until the next window."""
        known = [seconds for name, seconds in self.compute_s.items() if not self._is_stale(name)]
        self._typical_s = sum(known) / len(known) if known else COMPUTE_S

    def _is_stale(self, instance_id: str) -> bool:
        return self._n_windows - self._last.get(instance_id, self._n_windows) > _STALE * len(self._last)

    def forget(self, instance_id: str) -> None:
        """Drop what was learnt of an instance that is gone."""
        self.compute_s.pop(instance_id, None)
        self._n_observed.pop(instance_id, None)
        self._last.pop(instance_id, None)
        self._sum_up()

    def _parts(self, instance_id: str, work: Work) -> Mapping[object, float]:
        parts: dict[object, float] = {
            "request": work.n_requests * self._request_s,
            "compute": work.n_compute * self.compute(instance_id),
        }
        for place, n_tokens in work.fetched.items():
            parts[place] = n_tokens * self.fetch(place)
        return parts


class Turn:
    """What an instance does between prompts' first tokens: the prompts take turns, in whatever order."""

    __slots__ = ("_took", "_work", "seconds", "since")

    def __init__(self) -> None:
        self.seconds = 0.0
        """What those without an answer were predicted to take."""
        self.since = float("-inf")
        """When the last one had its answer."""
        self._work = Work()
        self._took = 0.0

    def note(self, work: Work, took: float) -> None:
        """Count one that is done."""
        self._work.add(work)
        self._took += took

    @property
    def is_enough(self) -> bool:
        """Whether they say something together: one by itself may have been worked on in another's time."""
        return self._work.n_requests >= _ENOUGH

    def take(self) -> tuple[Work, float]:
        """Return the work of those that were done and what it took, and begin anew."""
        taken = self._work, self._took
        self._work, self._took = Work(), 0.0
        return taken
