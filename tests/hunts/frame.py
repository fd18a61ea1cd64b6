"""What every hunt is made of: a promise, a schedule that is drawn from a seed, and a count of what was checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Tally = Counter[str]
"""How often each thing was checked: ``tally["hits"] += 1``. A hunt that checks nothing proves nothing."""

Stop = Callable[[], bool]
"""True when the time is up. A schedule may look at it between its steps and end early."""


class Broken(AssertionError):
    """A promise was seen broken; the text says what, where, and the steps that led there."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """One promise and how it is hunted.

    ``run(seed, tally, stop)`` runs one schedule: it draws every choice from ``random.Random(seed)``, raises `Broken` if
    the promise did not hold, and has given back descriptors, threads and mappings when it returns. A schedule takes
    well under ``patience`` seconds: one that takes longer has hung, and its process says where it stood.
    """

    name: str
    promise: str
    run: Callable[[int, Tally, Stop], None]
    patience: float = 240.0
    effects: tuple[str, ...] = ()
    """What the tally has of the schedules' faults and races where they are felt, not where they are planted. A hunt
    whose faults lead nowhere would hold every promise; so none of these may still be zero after ``enough`` schedules.
    """
    only_where: Mapping[str, Callable[[], bool]] = field(default_factory=dict)
    """Effects that not every machine can have; what says whether this one can is called by who has run the schedules.
    """
    enough: int = 50

    def missing(self, n_schedules: int, tally: Tally) -> list[str]:
        """Return the effects that so many schedules should have had, and had not."""
        if n_schedules < self.enough:
            return []
        return [effect for effect in self.effects if not tally[effect] and self._can_have(effect)]

    def _can_have(self, effect: str) -> bool:
        return effect not in self.only_where or self.only_where[effect]()
