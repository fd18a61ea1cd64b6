"""Which of pytest's processes runs which test: those of a module that share something go to one, which makes it once.

Tests go singly to whichever process is free. But each process that runs one of a module with a fixture of the module's
scope makes that fixture, be it sixteen nodes that have to meet. The marks of pytest-xdist say which tests belong
together as well; it has them in the names of tests, of which pytest 9.2 keeps nothing, so that it no longer heeds them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_SHARES = re.compile(r"@pytest\.fixture\([^)]*scope=\"module\"")
_MARK = re.compile(r"pytest\.mark\.xdist_group\(\"([^\"]+)\"\)")


@cache
def group_of(module: Path) -> str | None:
    """Return what the tests of a module belong to, by its text, since who deals tests out has imported none."""
    text = module.read_text()
    if (mark := _MARK.search(text)) is not None:
        return mark[1]
    return str(module) if _SHARES.search(text) else None


class Sharing(LoadScopeScheduling):
    """Deals out tests singly, and those of a group together; the largest groups first."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self._root / nodeid.partition("::")[0]) or nodeid
