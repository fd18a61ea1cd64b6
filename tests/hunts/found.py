"""Which hunts there are: the modules of this folder that have one."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from hunts.frame import Hunt

_NOT_HUNTS = {"__main__", "frame", "found", "levels", "worker"}


def names() -> list[str]:
    """Return the names of the modules that may have a hunt, without importing any."""
    folder = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(name for name in folder if name not in _NOT_HUNTS and not name.startswith("test_"))


@cache
def hunts() -> dict[str, Hunt]:
    """Return every hunt by its name."""
    found: dict[str, Hunt] = {}
    for name in names():
        hunt = getattr(importlib.import_module(f"hunts.{name}"), "HUNT", None)
        if isinstance(hunt, Hunt):
            assert hunt.name not in found, f"two hunts are called {hunt.name}"
            found[hunt.name] = hunt
    return found
