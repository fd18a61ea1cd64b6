"""What an attached engine does with pages: as a node does, but that it takes nothing back by itself.

Only a bump takes back what engines have published, and it takes back everybody's. So the driver has all engines hush
first: from then on they publish nothing, and the next version of each page is another one. When all have
answered one of them bumps, and what was published before must not be a hit of any call that begins after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from p2pkv import Node, P2PKVError

from .journal import Journal, Record
from .load import BUMP_S, N_PAGES, PageLoad
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    import numpy as np

    from .contents import Guarded


class EngineLoad(PageLoad):
    """Calls of one engine; :meth:`obey` is for the driver's thread.

    What an earlier process of this engine has published is still there.
    """

    def __init__(
        self, node: Node, names: Sequence[str], journal: Journal, *, past: Sequence[Record], seed: str
    ) -> None:
        super().__init__(node, names, journal, past=past, seed=seed)
        self._published, self._hot = _still_there(past)
        self._is_hushed = False
        self._stepping = threading.Lock()
        """Held for a step of the thread that publishes, so that none is under way while an engine hushes."""

    def _step(self, rng: Random, rows: np.ndarray, into: Guarded) -> None:
        with self._stepping:
            if self._is_hushed:
                self._fetch(rng, into)
            else:
                super()._step(rng, rows, into)

    def _take_back(self, rng: Random) -> None:
        self._exists(rng, None)  # a call of another kind in its place

    def obey(self, ask: dict[str, Any]) -> None:
        """Do one of the commands that are for engines only."""
        if ask["do"] == "hush":
            with self._stepping:
                self._is_hushed = True
                self._let_go()
                self._journal.write("take>", t=time.monotonic(), j=None)
                self._versions = [version + 1 for version in self._versions]
            self._journal.write("hushed", id=ask["id"])
        elif ask["do"] == "bump":
            self._bump(ask["id"])
        elif ask["do"] == "speak":
            self._is_hushed = False
        elif ask["do"] == "forget":
            with self._stepping:
                self._let_go()
                self._journal.write("forget", t=time.monotonic())

    def _let_go(self) -> None:
        self._journal.write("hot", drop=sorted(self._hot))
        self._published.clear()
        self._hot.clear()

    def _bump(self, number: int) -> None:
        with Stopwatch() as watch:
            try:
                unreached = list(self._node.bump(timeout=BUMP_S).unreached)
            except P2PKVError as error:
                unreached = [f"{type(error).__name__}: {error}"]
        self._journal.write("bump", **watch.span, id=number, unreached=unreached)


def _still_there(past: Sequence[Record]) -> tuple[set[int], set[int]]:
    """Return the pages, and the hot ones, that are published, by what earlier processes of this engine wrote down."""
    pages: set[int] = set()
    hot: set[int] = set()
    for record in past:
        if record["k"] == "publish":
            pages |= {number for number, hit in zip(record["j"], record["h"], strict=True) if hit}
        elif record["k"] == "hot":
            hot = (hot | set(record.get("add", ()))) - set(record.get("drop", ()))
        elif record["k"] == "forget":
            pages.clear()
        elif record["k"] == "take>":
            pages -= set(range(N_PAGES)) if record["j"] is None else set(record["j"])
    return pages, hot
