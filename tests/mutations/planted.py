"""A planted bug: a header that says what is broken and who has to find it, and a diff that breaks it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parent
_FIELD = re.compile(r"^(Bug|Hunter|Within): *(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_HUNTERS = ("hunt", "pytest", "native", "chaos", "rdma")


@dataclass(frozen=True)
class Planted:
    """One ``NAME.patch``. ``hunter`` is ``(kind, *arguments)``; ``within`` is in seconds, on a fast machine."""

    path: Path
    bug: str
    hunter: tuple[str, ...]
    within: float

    @classmethod
    def read(cls, path: Path) -> Planted:
        """Read one; raise ValueError naming the file if its header is not whole."""
        header = path.read_text().partition("diff --git")[0]
        fields = {name: " ".join(value.split()) for name, value in _FIELD.findall(header)}
        missing = [name for name in ("Bug", "Hunter", "Within") if not fields.get(name)]
        if missing:
            raise ValueError(f"{path.name}: no line '{missing[0]}:' before the diff")
        hunter = tuple(shlex.split(fields["Hunter"]))
        if hunter[0] not in _HUNTERS or len(hunter) < 2:
            raise ValueError(
                f"{path.name}: hunter '{fields['Hunter']}'; it is one of {', '.join(_HUNTERS)}, with its arguments"
            )
        return cls(path, fields["Bug"], hunter, float(fields["Within"]))

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def files(self) -> list[str]:
        """The files that the patch changes."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE)

    @property
    def is_native(self) -> bool:
        return any(name.startswith("native/") for name in self.files)


def planted() -> list[Planted]:
    """Return every planted bug, by name."""
    return [Planted.read(path) for path in sorted(FOLDER.glob("*.patch"))]
