"""Which promises were broken, by what the workers wrote down.

- **Bytes** are judged by the workers, who have them; here it is judged whether the version that came could come. A page
  that was taken back (``retract``, ``clear``) must not be a hit of any fetch that began after the call had returned.
  One thing is allowed, because docs/disk.md allows it: after a kill a node's disk may bring back what was
  retracted within ``KILLED_AT_ONCE_S`` before, or cleared by a call that took all its time.
- **Transfers**: a row that is ``OK`` at the receiver must be ``OK`` at the producer, who has its memory back.
- **Bystanders**: while one link is cut and nothing else is wrong, nodes at neither end of it find all they did before.
- **Deadlines**: a call may take its timeout and 100 ms, and as long as its own process, its own thread, or the whole
  machine as the driver sees it could not run during it.

A worker writes a cause before its consequence can be seen, so a fetch is judged when everybody's journal has been read
once more after it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from .journal import JournalReader, Record
from .load import BUMP_S, DEADLINE_S, HOT

GRACE_S = 0.1
"""What every call may take beyond its timeout."""
KILLED_AT_ONCE_S = 2.0
"""How long a retraction may take to be noted on disk: milliseconds, unless the process or the machine is busy."""
_UNNOTED_S = 0.8 * DEADLINE_S
"""A clear that took as long did not wait for its note on disk."""
_BYSTANDERS = 0.9
"""The share of earlier pages that nodes must find which a fault does not concern; one that is busy suspects others."""
_ENOUGH = 100
"""Pages asked for; fewer say nothing."""
_TIMEOUT_S: defaultdict[str, float] = defaultdict(lambda: DEADLINE_S, {"withdraw": 0.0, "bump": BUMP_S})


@dataclass(slots=True)
class Version:
    """One version of a page: when it was first published, and when the call that took it back had returned."""

    since: float
    until: float = inf
    is_cleared: bool = False
    """So that nothing brings it back, not even a kill."""
    told: float = inf
    """When a publish had said that anybody can fetch it now."""
    leaving: float = inf
    """When it was about to be taken back, or its owner to be killed."""


@dataclass(slots=True)
class Past:
    """What one node did, by its journal."""

    reader: JournalReader
    pages: defaultdict[int, dict[int, Version]] = field(default_factory=lambda: defaultdict(dict))
    published: set[int] = field(default_factory=set)
    """Own pages whose publish said ``HIT``, in this life of the process, and which were not taken back."""
    hot: set[int] = field(default_factory=set)
    late: list[tuple[float, float]] = field(default_factory=list)
    known_until: float = 0.0
    """Every lateness before this has been written down."""
    n_starts: int = 0
    is_up: bool = False
    killed_at: float = inf
    current: dict[int, int] = field(default_factory=dict)
    """The version of each page that was published last."""
    ended: float | None = None
    up_at: float = 0.0
    """When its process was up last."""
    answered: int = -1
    """The number of the driver's last command that it has done, of those that it waits for."""
    drained: Record | None = None
    """What became of the pages of a host's node, until the driver has judged it."""

    def leave(self, numbers: Iterable[int], now: float) -> None:
        """Expect nobody to find these pages from now on."""
        for number in numbers:
            for version in self.pages[number].values():
                version.leaving = min(version.leaving, now)

    def tell(self, numbers: Iterable[int], now: float) -> None:
        """Expect everybody to find these pages from now on."""
        for number in numbers:
            version = self.pages[number][self.current[number]]
            version.told, version.leaving = now, inf


@dataclass(slots=True)
class Watch:
    """What bystanders of a fault that should not concern them asked for, and what they found."""

    readers: frozenset[str]
    began: float
    ended: float
    asked: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)


class Oracle:
    """Reads the journals; ``broken`` has what it found, in plain words."""

    def __init__(
        self, readers: dict[str, JournalReader], disks: Iterable[str], kept: Iterable[str] = ()
    ) -> None:
        """``disks`` have what was published when they are started again; ``kept`` is what others have all the while."""
        self.past = {name: Past(reader) for name, reader in readers.items()}
        self.host_late: list[tuple[float, float]] = []
        """When the driver itself could not run: nobody is late then."""
        self.broken: list[str] = []
        self.tally: Counter[str] = Counter()
        self.worst_late_s = 0.0
        self.slowest: dict[str, float] = {}
        self.looked: dict[int, dict[str, dict[str, list[int]]]] = defaultdict(dict)
        self.watch: Watch | None = None
        self._disks = set(disks)
        self._kept = set(kept)
        self._unjudged: list[tuple[str, Record]] = []
        self._slow: list[tuple[str, str, Record]] = []
        self._refused: dict[tuple[str, int], set[int]] = {}
        self._accepted: dict[tuple[str, int], set[int]] = defaultdict(set)

    def read(self) -> None:
        """Read what is new, and judge what can be judged by now."""
        fetches, self._unjudged = self._unjudged, []
        for name, past in self.past.items():
            for record in past.reader.read():
                self._take(name, past, record)
        for name, fetch in fetches:
            self._judge_fetch(name, fetch)
        self._judge_slow()

    def killed(self, name: str, now: float) -> None:
        """Note that a node's process is about to be killed."""
        past = self.past[name]
        past.is_up, past.killed_at = False, now
        if name in self._kept:
            return
        past.leave(past.pages, now)
        past.published.clear()
        past.hot.clear()

    def ends(self, name: str) -> None:
        """Note that a process is about to be told to end; it is started again."""
        self.past[name].is_up = False

    def _take(self, name: str, past: Past, record: Record) -> None:
        kind = record["k"]
        if kind == "broken":
            self.broken.append(record["what"])
        elif kind == "up":
            self._started(name, past, record["t"])
        elif kind == "publish>":
            for number, version in zip(record["j"], record["v"], strict=True):
                past.pages[number].setdefault(version, Version(record["t"]))
                past.current[number] = version
        elif kind == "publish":
            there = {number for number, hit in zip(record["j"], record["h"], strict=True) if hit}
            past.published |= there
            past.tell(there, record["e"])
            self._called(name, "publish", record, len(record["j"]), len(there))
        elif kind == "take>":
            gone = set(past.pages) if record["j"] is None else set(record["j"])
            past.published -= gone
            past.leave(gone, record["t"])
        elif kind == "take":
            self._taken_back(name, past, record)
        elif kind == "fetch":
            self._unjudged.append((name, record))
            n_hits = sum(version is not None for version in record["v"])
            self._called(name, "fetch", record, len(record["j"]), n_hits)
        elif kind == "call":
            self._called(name, record["what"], record, record["n"], record["h"])
        else:
            self._take_rest(past, record, name)

    def _take_rest(self, past: Past, record: Record, name: str) -> None:
        kind = record["k"]
        if kind == "late":
            past.late.append((record["b"], record["e"]))
        elif kind == "tick":
            past.known_until = record["t"]
        elif kind == "hot":
            past.hot |= set(record.get("add", ()))
            past.hot -= set(record.get("drop", ()))
        elif kind == "gave":
            self._refused[record["req"], record["s"]] = set(record["rows"])
            self._compare(record["req"], record["s"])
        elif kind == "got":
            for row, serial in record["rows"]:
                self._accepted[record["req"], serial].add(row)
                self._compare(record["req"], serial)
        elif kind == "looked":
            self.looked[record["id"]][name] = record["found"]
        elif kind == "ended":
            past.ended = record["e"] - record["b"]
        elif kind == "hushed":
            past.answered = record["id"]
        elif kind == "bump":
            past.answered = record["id"]
            self._bumped(name, record)
        elif kind == "forget":
            past.published.clear()
            past.leave(past.pages, record["t"])
        elif kind == "drained":
            past.drained = record
        elif kind == "refused":
            self.tally["refused starts"] += 1

    def _started(self, name: str, past: Past, now: float) -> None:
        past.n_starts += 1
        past.is_up, past.up_at, past.ended = True, now, None
        if name in self._kept:
            return
        past.published.clear()
        past.hot.clear()
        if name in self._disks and past.n_starts > 1:
            for versions in past.pages.values():
                for version in versions.values():
                    if not version.is_cleared and past.killed_at - version.until < KILLED_AT_ONCE_S:
                        version.until = inf

    def _taken_back(self, name: str, past: Past, record: Record) -> None:
        is_clear = record["j"] is None
        is_noted = is_clear and record["e"] - record["b"] < _UNNOTED_S
        for number in list(past.pages) if is_clear else record["j"]:
            for version in past.pages[number].values():
                version.is_cleared |= is_noted
                if version.until == inf:
                    version.until = record["e"]
        self._called(name, "clear" if is_clear else "retract", record, 0, 0)

    def _bumped(self, name: str, record: Record) -> None:
        """Expect nothing of what anybody had published to be found, if everybody has heard that it was taken back."""
        self._called(name, "bump", record, 1, not record["unreached"])
        if record["unreached"]:
            return
        for each in self._kept:
            for versions in self.past[each].pages.values():
                for version in versions.values():
                    if version.since < record["b"] and version.until == inf:
                        version.until, version.is_cleared = record["e"], True

    def _called(self, name: str, what: str, record: Record, n_rows: int, n_hits: int) -> None:
        self.tally["calls"] += 1
        self.tally[f"{what} calls"] += 1
        self.tally[f"{what} hits"] += n_hits
        self.tally[f"{what} misses"] += n_rows - n_hits
        seconds = record["e"] - record["b"]
        if seconds > _TIMEOUT_S[what] + GRACE_S:
            self._slow.append((name, what, record))
        else:
            self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)

    def _judge_fetch(self, reader: str, fetch: Record) -> None:
        if fetch["o"] == HOT:
            return  # has several owners: some may have taken it back, and others not
        pages = self.past[fetch["o"]].pages
        self._watch_fetch(reader, fetch)
        for number, got in zip(fetch["j"], fetch["v"], strict=True):
            if got is None or got < 0:
                continue
            version = pages[number].get(got)
            if version is None or version.since > fetch["e"]:
                self.broken.append(f"{reader}: {fetch['o']}:{number} came in version {got}, never published")
            elif version.until < fetch["b"]:
                self.tally["taken back hits"] += 1
                how = "cleared" if version.is_cleared else "retracted"
                ago = fetch["b"] - version.until
                self.broken.append(
                    f"{reader}: {fetch['o']}:{number} in version {got} was a hit {ago:.3f} s after it was {how}"
                )

    def _watch_fetch(self, reader: str, fetch: Record) -> None:
        """Count what a bystander has to find: pages from before the cut, of nodes whose disks can't have lost them."""
        watch, owner = self.watch, fetch["o"]
        if watch is None or reader not in watch.readers or owner in self._disks:
            return
        if fetch["b"] < watch.began or fetch["e"] > watch.ended:
            return
        for number, got in zip(fetch["j"], fetch["v"], strict=True):
            for version in self.past[owner].pages[number].values():
                if version.told < watch.began and fetch["e"] < version.leaving:
                    watch.asked[owner] += 1
                    watch.found[owner] += got is not None

    def judge_watch(self) -> None:
        """Judge what bystanders found since they are watched."""
        watch, self.watch = self.watch, None
        for owner, n_asked in watch.asked.items() if watch is not None else ():
            n_found = watch.found[owner] if watch is not None else 0
            self.tally["bystanders asked"] += n_asked
            self.tally["bystanders found"] += n_found
            if n_asked >= _ENOUGH and n_found < _BYSTANDERS * n_asked:
                self.broken.append(
                    f"one link was cut, and nodes at neither end found {n_found} of {n_asked} pages of {owner}"
                )

    def _compare(self, request: str, serial: int) -> None:
        both = self._refused.get((request, serial), set()) & self._accepted[request, serial]
        if both:
            self.broken.append(
                f"{request}: rows {sorted(both)} are OK at the receiver, and not at the producer"
            )

    def _judge_slow(self) -> None:
        waiting, self._slow = self._slow, []
        for name, what, record in waiting:
            past, began, ended = self.past[name], record["b"], record["e"]
            if past.known_until < ended and past.is_up:
                self._slow.append((name, what, record))
                continue
            could_not_run = _overlap(past.late, began, ended) + _overlap(self.host_late, began, ended)
            excused = could_not_run + record["w"]
            seconds = ended - began - excused
            self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)
            late_s = seconds - _TIMEOUT_S[what] - GRACE_S
            # of a process that died at once after the call, it is not known whether it could run
            if late_s > 0 and past.known_until >= ended:
                self.tally["late calls"] += 1
                self.worst_late_s = max(self.worst_late_s, late_s)
                self.broken.append(
                    f"{name}: {what} took {ended - began:.3f} s, {excused:.3f} s of it excused: {late_s:.3f} s too long"
                )


def _overlap(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    return sum(max(0.0, min(end, ended) - max(begin, began)) for begin, end in reversed(spans) if end > began)
