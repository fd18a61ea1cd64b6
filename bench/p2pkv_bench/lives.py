"""Lives that end: an engine is killed under load, and the node of a host, with engines that are attached to it.

All are processes of their own, and end at once, by SIGKILL or as that does: the node and its engines of one host,
another host's node, which reads over TCP, and a keeper. Every page that is found is compared with what it has to be,
byte for byte.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from p2pkv import _native
from p2pkv.memory.available import available_memory
from p2pkv.testing.processes import ChildEndedError, ChildProcess
from p2pkv_bench.errors import BenchError
from p2pkv_bench.holding import Holding
from p2pkv_bench.lives_member import BATCH, progress_of
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

_PAGE_NBYTES = 4 * KIB
_LOADED_NBYTES = 16 * KIB
_LOADED_PAGES = 8192
"""The engine that is killed publishes at most so many, and dies when it has done with half of them."""
_TRIED = 2000
"""Pages of a sample by which another host's node finds out whether those of a successor are found."""
_SECOND = 1.0
_PATIENCE_S = 120.0
_AWAY_S = 1.0
"""The host's node is away for so long before its successor is started."""
_REMOTE_PAGES = 1024
_LEAST = Target(99.0)
_AT_ONCE = Target(_SECOND, at_most=True)
_LOOK_S = 0.002

Figures = dict[str, tuple[str, float]]
"""A case says what was measured, with its unit."""


class House(Holding):
    """A host with a node, whatever its life, and its engines; another host's node; a keeper, if there is one."""

    def __init__(self, meeting: Meeting, pool_nbytes: int, page_nbytes: int, *, is_kept: bool) -> None:
        self._undo = ExitStack()
        self._meeting = meeting
        self._pool_nbytes, self._page_nbytes = pool_nbytes, page_nbytes
        self._path = f"unix:{meeting.folder}/host"
        self._kept: dict[str, object] = {}
        try:
            if is_kept:
                keeper = f"unix:{meeting.folder}/keeper"
                command = [sys.executable, "-m", "p2pkv", "keeper", keeper]
                process = self._undo.enter_context(ChildProcess(command, name="the keeper", folder="/"))
                if b"listens" not in process.read(_PATIENCE_S):
                    raise BenchError("the keeper does not listen")
                self._kept = {"keeper": keeper}
            # first, so that the address where all meet is of a node that stays
            self.other = self.start("other", transports=["tcp"], pool_size=64 * MIB)
            self.host = self.live()
            self.host.answer()
            self.host.call("wait_for", n_members=2, seconds=_PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def live(self) -> Peer:
        """Start a life of the host's node; the caller waits for it."""
        self.host = self._undo.enter_context(Peer("p2pkv_bench.lives_member"))
        self.host.send(
            "start",
            config=self._settings(
                "host",
                transports=["shm", "tcp"],
                pool_size=self._pool_nbytes,
                attach_listen=self._path,
                **self._kept,
            ),
            page_nbytes=self._page_nbytes,
        )
        return self.host

    def attach(self, name: str) -> Peer:
        """Start an engine of the host."""
        return self.start(name, attach=self._path, transports=["shm", "tcp"])

    def start(self, name: str, **more: object) -> Peer:
        """Start a node or an engine."""
        peer = self._undo.enter_context(Peer("p2pkv_bench.lives_member"))
        peer.call("start", config=self._settings(name, **more), page_nbytes=self._page_nbytes)
        return peer

    def _settings(self, name: str, **more: object) -> dict[str, object]:
        return self._meeting.settings(name, **({"replicas": 2, "buffer_size": 0} | more))

    def listens_at(self, patience: float) -> float:
        """Return when the host's node lets engines in, on the monotonic clock."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                _native.visit_attach_host(self._path.removeprefix("unix:"), 1.0)
            except RuntimeError:
                time.sleep(_LOOK_S)  # it says so to nobody before
            else:
                return time.monotonic()
        raise BenchError(f"the host's node does not listen after {patience:g} s")


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Kill engines, then nodes, each as often as there are rounds."""
    yield from _shown(
        "an engine is killed while it publishes", plan, [_killed_engine(plan) for _ in range(plan.rounds)]
    )
    yield from _shown("the host's node is killed", plan, _lives(plan, 0, is_kept=False))
    for n_pages in plan.kept:
        needed = _pool_nbytes(n_pages) * 3 // 2
        if (left := available_memory()) is not None and needed > left.nbytes:
            plan.tell(f"lives: no memory for {n_pages:,} pages")
            continue
        name = f"the host's node is killed, a keeper has {n_pages:,} pages"
        yield from _shown(name, plan, _lives(plan, n_pages, is_kept=True))


def _pool_nbytes(n_pages: int) -> int:
    return n_pages * _PAGE_NBYTES + 16 * MIB


_TARGETS: Mapping[str, Target] = {
    "hits on its own host, asked for after 1 s": _LEAST,
    "hits from another host, asked for after 1 s": _LEAST,
    "local pages that engines find meanwhile": _LEAST,
    "another host's pages that engines find meanwhile": _LEAST,
    "engines publish again after": _AT_ONCE,
    "its successor listens after": _AT_ONCE,
}


def _shown(name: str, plan: Plan, figures: list[Figures]) -> Iterator[Row]:
    for what, (unit, _) in figures[0].items():
        yield make_row(
            {"p2pkv": [one[what][1] for one in figures]},
            suite="lives",
            case=f"{name}: {what}",
            unit=unit,
            target=_TARGETS.get(what),
        )


def _killed_engine(plan: Plan) -> Figures:
    """Kill an engine that publishes as fast as it can; say what is found of its pages a second later."""
    plan.tell("lives: an engine is killed")
    pool_nbytes = 2 * _LOADED_PAGES * _LOADED_NBYTES
    with Meeting() as meeting, House(meeting, pool_nbytes, _LOADED_NBYTES, is_kept=False) as house:
        progress = meeting.folder / "progress"
        progress.write_bytes(bytes(8))
        busy, killed, reader = (house.attach(name) for name in ("busy", "killed", "reader"))
        if busy.call("publish", kind="busy", n_pages=1024) != 1024:
            raise BenchError("pages found no room")
        busy.send("read_for", kind="busy", n_pages=1024, seconds=3.0)
        killed.send(
            "publish",
            kind="killed",
            n_pages=_LOADED_PAGES,
            progress=str(progress),
            dies_after=_LOADED_PAGES // 2,
        )
        began = _ended_at(killed)
        n_told = progress_of(progress)
        if not 0 < n_told < _LOADED_PAGES:
            raise BenchError(f"an engine was killed when it had published {n_told} of {_LOADED_PAGES} pages")
        # it may have died between what was stored and what it said of that: a batch at most
        told = {
            "kind": "killed",
            "n_pages": n_told + BATCH,
            "began": began,
            "grace": _SECOND,
            "patience": 5.0,
        }
        finders = {"on its own host": reader, "from another host": house.other}
        for peer in finders.values():
            peer.send("find", **told)
        answers = {where: peer.answer() for where, peer in finders.items()}
        busy.answer()
    theirs = set(range(n_told)).union(*(answer["found"] for answer in answers.values()))
    figures: Figures = {"pages that it has published": ("", float(len(theirs)))}
    for where, answer in answers.items():
        late = theirs.intersection(answer["late"])
        figures[f"hits {where}, asked for after 1 s"] = "%", 100 * (1 - len(late) / len(theirs))
        figures[f"found {where} in the end"] = "%", 100 * len(answer["found"]) / len(theirs)
        figures[f"99 % are read {where} after"] = "s", _time_of(answer["times"], 0.99 * len(theirs))
    return figures


def _ended_at(peer: Peer) -> float:
    """Wait until a process has ended that does so by itself; return when it has, on the monotonic clock."""
    try:
        answer = peer.read(_PATIENCE_S)
    except ChildEndedError:
        return time.monotonic()
    except TimeoutError as error:
        raise BenchError(str(error)) from None
    raise BenchError(f"an engine that was to die answers {answer!r}")


def _time_of(times: list[float], n: float) -> float:
    return sorted(times)[int(np.ceil(n)) - 1] if len(times) >= n else float("inf")


def _lives(plan: Plan, n_pages: int, *, is_kept: bool) -> list[Figures]:
    """Kill the node of a host as often as there are rounds, while an engine goes on; say what each time took."""
    with Meeting() as meeting, House(meeting, _pool_nbytes(n_pages), _PAGE_NBYTES, is_kept=is_kept) as house:
        plan.tell(f"lives: {n_pages:,} pages are published")
        engine = house.attach("engine")
        for peer, kind, n in ((engine, "local", n_pages), (house.other, "remote", _REMOTE_PAGES)):
            peer.send("publish", kind=kind, n_pages=n)
            if (n_published := int(peer.answer(_PATIENCE_S * 5))) != n:
                raise BenchError(f"{n_published} of {n} pages found room")
        return [_next_life(plan, house, engine, n_pages) for _ in range(plan.rounds)]


def _next_life(plan: Plan, house: House, engine: Peer, n_pages: int) -> Figures:
    plan.tell(f"lives: the host's node is killed, {n_pages:,} pages")
    engine.call("begin_calls", n_local=n_pages, n_remote=_REMOTE_PAGES)
    house.host.kill()
    killed = time.monotonic()
    time.sleep(_AWAY_S)
    began = time.monotonic()
    house.live()
    if n_pages:
        house.other.send("find_some", kind="local", n_pages=n_pages, n_tried=_TRIED, patience=_PATIENCE_S)
    listens = house.listens_at(_PATIENCE_S)
    starts = float(house.host.answer())
    times: dict[str, float] = house.other.answer(2 * _PATIENCE_S) if n_pages else {}
    if n_pages and "all" not in times:
        raise BenchError(f"another host does not find all pages {_PATIENCE_S:g} s after a start")
    calls = engine.call("end_calls", after=listens, patience=30.0)
    figures = _of_calls(calls, killed, listens)
    figures["its successor listens after"] = "s", listens - began
    figures["of it, until Python has imported what a node needs"] = "s", starts - began
    if n_pages:
        for what, name in (("99 %", "most"), ("all", "all")):
            # Other hosts are served a moment before engines are let in, which is what is called listening.
            after = max(0.0, times[name] - listens)
            figures[f"another host finds {what} of its pages, since it listens, after"] = "s", after
        house.other.send("verify", kind="local", n_pages=n_pages)
        if (n_found := int(house.other.answer(_PATIENCE_S * 5))) != n_pages:
            raise BenchError(f"another host finds {n_found} of {n_pages} pages")
    return figures


def _of_calls(calls: list[Any], killed: float, listens: float) -> Figures:
    """Say what an engine's calls had of those that began while its node was away, and when it noticed its return."""
    figures: Figures = {}
    meanwhile = [call for call in calls if call[1] >= killed and call[2] < listens]
    for kind, name in (("local", "local pages"), ("remote", "another host's pages")):
        asked, found = (sum(call[column] for call in meanwhile if call[0] == kind) for column in (3, 4))
        if asked:
            figures[f"{name} that engines find meanwhile"] = "%", 100 * found / asked
    lasted = [ended - at for kind, at, ended, *_ in meanwhile if kind != "publish"]
    figures["calls of an engine meanwhile"] = "", float(len(lasted))
    figures["the longest of them"] = "ms", 1e3 * max(lasted)
    again = [
        ended
        for kind, _, ended, _, n_hits in calls
        if kind == "publish" and n_hits and ended > killed + _AWAY_S
    ]
    if not again:
        raise BenchError("an engine publishes nothing after its node has come back")
    figures["engines publish again after"] = "s", max(0.0, again[0] - listens)
    return figures
