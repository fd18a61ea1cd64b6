"""An engine or a node of the suite ``lives``: ``python -m p2pkv_bench.lives_member``; it does what stdin says.

A page is its number over and over, so that every process knows what each has to be, and no wrong byte is a hit.
"""

from __future__ import annotations

import mmap
import signal
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.config import Config
from p2pkv.node import Node
from p2pkv.testing.processes import obey
from p2pkv_bench.errors import BenchError

BATCH = 32
_COUNT = struct.Struct("<Q")
_WAIT_S = 0.002
"""Between two tries of what is waited for; a try takes a millisecond or less."""
_DIES_S = 0.001
"""A batch or two of an engine that dies, so that it does so in the middle of one."""
_LOCAL, _REMOTE = "local", "remote"


def keys_of(kind: str, numbers: Sequence[int] | NDArray[np.int64]) -> list[str]:
    """Return the keys of pages of a kind."""
    return [f"{kind}/{number}" for number in numbers]


class Pages:
    """Memory of a process for some pages, registered with its node."""

    def __init__(self, node: Node, page_nbytes: int) -> None:
        self._node = node
        self._rows = np.zeros((BATCH, page_nbytes), np.uint8)
        self._numbers = self._rows.view(np.int64)
        self._memory = node.register_memory(self._rows)

    def publish(self, kind: str, numbers: NDArray[np.int64], timeout: float) -> int:
        """Publish pages, a batch at most; return how many are."""
        self._numbers[: len(numbers)] = numbers[:, None]
        return int(
            self._node.publish(keys_of(kind, numbers), self._rows[: len(numbers)], timeout=timeout).sum()
        )

    def fetch(self, kind: str, numbers: NDArray[np.int64], timeout: float) -> NDArray[np.bool_]:
        """Say which pages were fetched, a batch at most; a wrong byte is a :class:`BenchError`."""
        rows = self._rows[: len(numbers)]
        rows[:] = 0xFF
        hits = self._node.fetch(keys_of(kind, numbers), rows, timeout=timeout).astype(np.bool_)
        if not (self._numbers[: len(numbers)][hits] == numbers[hits][:, None]).all():
            raise BenchError(f"wrong bytes in pages of {kind} from {numbers[0]} on")
        return hits

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class LivesMember:
    """Its methods are the commands."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._page_nbytes = 0
        self._loop: threading.Thread | None = None
        self._is_over = threading.Event()
        self._calls: list[tuple[str, float, float, int, int]] = []
        self._failure: BaseException | None = None

    @property
    def node(self) -> Node:
        """The node, once it is started."""
        assert self._node is not None
        return self._node

    def start(self, config: dict[str, Any], page_nbytes: int) -> float:
        """Start the node; return when that began, on the monotonic clock, since Python's imports take a while."""
        began = time.monotonic()
        self._page_nbytes = page_nbytes
        self._node = Node.start(Config.load(config, environ={}))
        return began

    def wait_for(self, n_members: int, seconds: float) -> None:
        """Wait until the node sees so many members."""
        until = time.monotonic() + seconds
        while sum(member.state.name == "ALIVE" for member in self.node.members()) != n_members:
            if time.monotonic() > until:
                raise BenchError(
                    f"{self.node.node_id} sees {len(self.node.members())} members, not {n_members}"
                )
            time.sleep(0.02)

    def publish(self, kind: str, n_pages: int, progress: str = "", dies_after: int = 0) -> int:
        """Publish so many pages; return how many were, and say in the file ``progress`` which are, as it goes.

        With ``dies_after`` the process ends in the middle of a batch when so many are published, and says nothing.
        """
        n_published = 0
        pages = Pages(self.node, self._page_nbytes)
        shown = _shown(progress)
        for first in range(0, n_pages, BATCH):
            numbers = np.arange(first, min(first + BATCH, n_pages))
            n_published += pages.publish(kind, numbers, 30.0)
            if shown is not None:
                _COUNT.pack_into(shown, 0, n_published)
            if 0 < dies_after <= n_published:
                _die()
                dies_after = 0
        pages.close()
        return n_published

    def read_for(self, kind: str, n_pages: int, seconds: float) -> int:
        """Fetch pages for so long; return how many were fetched."""
        pages, random, n_fetched = Pages(self.node, self._page_nbytes), np.random.default_rng(1), 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            n_fetched += int(pages.fetch(kind, np.unique(random.integers(0, n_pages, BATCH)), 10.0).sum())
        pages.close()
        return n_fetched

    def find(self, kind: str, n_pages: int, began: float, grace: float, patience: float) -> dict[str, Any]:
        """Fetch pages until each was fetched once, ``patience`` seconds from ``began`` on at most.

        Return which were found, after how many seconds each, and which were missed by a fetch that began after
        ``grace`` seconds.
        """
        pages = Pages(self.node, self._page_nbytes)
        missing, found, times, late = np.arange(n_pages), [], [], set()
        while len(missing) and time.monotonic() - began < patience:
            left = []
            for at in range(0, len(missing), BATCH):
                numbers = missing[at : at + BATCH]
                is_late = time.monotonic() - began >= grace
                hits = pages.fetch(kind, numbers, 1.0)
                found += numbers[hits].tolist()
                times += [time.monotonic() - began] * int(hits.sum())
                left.append(numbers[~hits])
                if is_late:
                    late.update(numbers[~hits].tolist())
            missing = np.concatenate(left)
            time.sleep(_WAIT_S)
        pages.close()
        return {"found": found, "times": times, "late": sorted(late)}

    def find_some(self, kind: str, n_pages: int, n_tried: int, patience: float) -> dict[str, float]:
        """Fetch some pages over and over until all are found; return when 99 % were, and when all, by the clock."""
        pages = Pages(self.node, self._page_nbytes)
        some = np.unique(np.random.default_rng(2).integers(0, n_pages, n_tried))
        times: dict[str, float] = {}
        until = time.monotonic() + patience
        while "all" not in times and time.monotonic() < until:
            n_found = sum(
                int(pages.fetch(kind, some[at : at + BATCH], 1.0).sum()) for at in range(0, len(some), BATCH)
            )
            now = time.monotonic()
            if n_found >= 0.99 * len(some):
                times.setdefault("most", now)
            if n_found == len(some):
                times["all"] = now
            time.sleep(_WAIT_S)
        pages.close()
        return times

    def verify(self, kind: str, n_pages: int) -> int:
        """Fetch all pages once; return how many there are."""
        pages, n_found = Pages(self.node, self._page_nbytes), 0
        for first in range(0, n_pages, BATCH):
            n_found += int(pages.fetch(kind, np.arange(first, min(first + BATCH, n_pages)), 10.0).sum())
        pages.close()
        return n_found

    def begin_calls(self, n_local: int, n_remote: int) -> None:
        """Fetch local and remote pages, and publish, by turns from now on, until :meth:`end_calls`."""
        self._is_over.clear()
        self._calls, self._failure = [], None
        self._loop = threading.Thread(target=self._call, args=(n_local, n_remote), name="p2pkv-bench")
        self._loop.start()

    def _call(self, n_local: int, n_remote: int) -> None:
        pages, random, n_published = Pages(self.node, self._page_nbytes), np.random.default_rng(3), 0
        try:
            while not self._is_over.is_set():
                for kind, n_pages in ((_LOCAL, n_local), (_REMOTE, n_remote)):
                    if n_pages:
                        numbers = np.unique(random.integers(0, n_pages, BATCH))
                        began = time.monotonic()
                        n_hits = int(pages.fetch(kind, numbers, 1.0).sum())
                        self._calls.append((kind, began, time.monotonic(), len(numbers), n_hits))
                began = time.monotonic()
                n_hits = pages.publish(f"live-{self.node.node_id}", np.array([n_published % 64]), 1.0)
                self._calls.append(("publish", began, time.monotonic(), 1, n_hits))
                n_published += 1
                self._is_over.wait(_WAIT_S)
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
            self._failure = error
        finally:
            pages.close()

    def end_calls(self, after: float, patience: float) -> list[tuple[str, float, float, int, int]]:
        """Return what was called: what, when it began and ended, how many pages, how many hits.

        It goes on until something was published that began ``after`` a time, or patience has an end.
        """
        assert self._loop is not None
        until = time.monotonic() + patience
        while time.monotonic() < until and not any(
            what == "publish" and began > after and n_hits for what, began, _, _, n_hits in self._calls[-64:]
        ):
            time.sleep(_WAIT_S)
        self._is_over.set()
        self._loop.join()
        if self._failure is not None:
            raise self._failure
        return self._calls

    def close(self) -> None:
        """Leave."""
        self._is_over.set()
        if self._node is not None:
            self._node.close()


def _die() -> None:
    """Have the kernel end this process in a moment, whatever it does then.

    Another process that sends SIGKILL may wait for a processor until this one has done all that it was told. The signal
    of a timer ends a process as that does: at once, and with all its threads.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _DIES_S)


def _shown(path: str) -> mmap.mmap | None:
    """Return memory that outlives this process; none without a path."""
    if not path:
        return None
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), _COUNT.size)


def progress_of(path: Path) -> int:
    """Return how many pages a process has said are published, which may have been killed since."""
    (count,) = _COUNT.unpack(path.read_bytes())
    return int(count)


if __name__ == "__main__":
    member = LivesMember()
    obey(member)
    member.close()
