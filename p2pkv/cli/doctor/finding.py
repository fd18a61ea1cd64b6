"""What ``p2pkv doctor`` finds: a line each."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from enum import Enum

GIB = 1 << 30
MIB = 1 << 20


class Verdict(Enum):
    """What a finding means for a node here: its mark and color."""

    GOOD = ("ok  ", "green")
    NOTE = ("note", "yellow")
    BAD = ("BAD ", "red")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line; ``advice`` says what to do, where something could be done."""

    verdict: Verdict
    what: str
    says: str
    advice: str = ""

    def as_record(self) -> dict[str, str]:
        """Return what ``--json`` prints."""
        return {
            "verdict": self.verdict.name.lower(),
            "what": self.what,
            "says": self.says,
            "advice": self.advice,
        }


def size(nbytes: int | None) -> str:
    """Say an amount of memory."""
    if nbytes is None:
        return "an unknown amount"
    # in GiB all that matters on a small disk, or of a tenant, would be 0.0
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def limit(value: int, unit: str) -> str:
    """Say a resource limit."""
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}{unit}"
