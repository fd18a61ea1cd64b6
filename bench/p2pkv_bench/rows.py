"""What the benchmark finds out: a row a case, with what it is compared to and what the budget asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of all rounds, and the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value a round."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Reference:
    """Something that moved the same bytes, or did the least that could be done, in the same rounds."""

    name: str
    value: Spread
    ratio: Spread
    """Ours divided by this one, round by round."""
    best: float
    """Our best round divided by its best: what remains when other programs take the processor away."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the budget asks for: ``bound`` of the ratio to a reference, or of our own value without one."""

    bound: float
    reference: str = ""
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case."""

    suite: str
    case: str
    unit: str
    value: Spread
    subject: str = "p2pkv"
    """What the value is of."""
    transport: str = ""
    page_nbytes: int = 0
    batch: int = 0
    threads: int = 1
    references: tuple[Reference, ...] = ()
    target: Target | None = None

    @property
    def judged(self) -> float | None:
        """What the target is compared with."""
        if self.target is None:
            return None
        for reference in self.references:
            if reference.name == self.target.reference:
                return reference.ratio.median
        return self.value.median

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        judged = self.judged
        return None if self.target is None or judged is None else self.target.is_met(judged)


def make_row(
    rounds: dict[str, list[float]],
    *,
    suite: str,
    case: str,
    unit: str,
    transport: str = "",
    page_nbytes: int = 0,
    batch: int = 0,
    threads: int = 1,
    target: Target | None = None,
) -> Row:
    """Make a row of the values that each contestant had in each round; the first one is ours."""
    (subject, ours), *others = rounds.items()
    best = min if unit in {"us", "ms"} else max
    references = [
        Reference(
            name,
            Spread.of(values),
            Spread.of([a / b for a, b in zip(ours, values, strict=True)]),
            best(ours) / best(values),
        )
        for name, values in others
    ]
    return Row(
        suite=suite,
        case=case,
        unit=unit,
        value=Spread.of(ours),
        subject=subject,
        transport=transport,
        page_nbytes=page_nbytes,
        batch=batch,
        threads=threads,
        references=tuple(references),
        target=target,
    )
