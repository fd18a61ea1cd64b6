"""A whole cluster of node processes on this machine: what it costs to be one of many, and what comes and goes cost all.

All share the processors, so that times are those of a machine with far too much to do; what is counted is not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from p2pkv_bench.errors import BenchError
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rows import Row, make_row

_REPLICAS = 2
_PAGES = 512
"""Pages that each member publishes."""
_PROMPT = 128
_PROMPTS = 16
_IDLE_S = 10.0
_MEET_S = 180.0
_STEADY_S = 3.0
"""How long entries stay where they are before they are taken for settled."""
_SETTLE_S = 120.0
_READERS = 3
_ENTRIES, _CONTROL, _DIRECTORY = (
    "p2pkv_shard_entries",
    "p2pkv_control_requests_total",
    "p2pkv_directory_requests_total",
)
_COUNTS = [_ENTRIES, _CONTROL, _DIRECTORY]
_SENT = re.compile(r"bytes_sent:(\d+)")
_PID = re.compile(r"pid=(\d+)")


@dataclass(frozen=True, slots=True)
class Counts:
    """Holds what all members of a cluster have counted together by now."""

    at: float
    entries: dict[str, float]
    requests: float
    sent: dict[str, int]
    """Bytes by connection."""

    def sent_since(self, before: Counts) -> int:
        """Return the bytes of connections that are there now; one that was closed meanwhile is left out."""
        return sum(nbytes - before.sent.get(name, 0) for name, nbytes in self.sent.items())

    def gained_since(self, before: Counts) -> float:
        """Return how many entries members have that they had not."""
        return sum(max(0.0, n - before.entries.get(name, 0.0)) for name, n in self.entries.items())


class Crowd:
    """The processes of a cluster, by their names."""

    def __init__(self, meeting: Meeting, plan: Plan) -> None:
        self._meeting, self._plan = meeting, plan
        self._undo = ExitStack()
        self._spare: list[Peer] = []
        self.peers: dict[str, Peer] = {}

    def spawn(self, n: int) -> None:
        """Start so many processes, and wait until each is ready to be told."""
        peers = [self._undo.enter_context(Peer("p2pkv_bench.members")) for _ in range(n)]
        for peer in peers:
            peer.send("close")
        for peer in peers:
            peer.answer(_MEET_S)
        self._spare += peers

    def start(self, n: int) -> float:
        """Have so many of them be nodes at once; return the seconds until every member sees every other one."""
        for _ in range(n):
            self.peers[f"m{len(self.peers)}"] = self._spare.pop()
        new = list(self.peers.items())[-n:]
        began = time.monotonic()
        for name, peer in new:
            more = {"replicas": _REPLICAS, "pool_size": "4MiB", "buffer_size": 0}
            peer.send("start", config=self._meeting.settings(name, **more))
        for _, peer in new:
            peer.answer(_MEET_S)
        return self.wait_for_all() - began

    def wait_for_all(self) -> float:
        """Return when the last member saw exactly those that are there."""
        for peer in self.peers.values():
            peer.send("wait_for", n_members=len(self.peers), seconds=_MEET_S)
        return max(float(peer.answer(_MEET_S + 60)) for peer in self.peers.values())

    def publish(self) -> None:
        """Have all publish, some at a time; those again whose owners were late, as any may be on so few processors."""
        until = time.monotonic() + _MEET_S
        left = list(self.peers.values())
        while left:
            some, left = left[:4], left[4:]
            for peer in some:
                peer.send("publish", n_pages=_PAGES)
            for peer in some:
                if (n := int(peer.answer(_MEET_S))) != _PAGES:
                    if time.monotonic() > until:
                        raise BenchError(f"{n} of {_PAGES} pages were published")
                    left.append(peer)

    def counts(self) -> Counts:
        """Ask all what they have counted."""
        for peer in self.peers.values():
            peer.send("counters", names=_COUNTS)
        answers = {name: peer.answer() for name, peer in self.peers.items()}
        entries = {name: answer[0] for name, answer in answers.items()}
        requests = sum(answer[1] + answer[2] for answer in answers.values())
        return Counts(time.monotonic(), entries, requests, self._sent())

    def _sent(self) -> dict[str, int]:
        """Return the bytes that each TCP connection of a member has sent; nothing where ``ss`` is not there."""
        if shutil.which("ss") is None:
            return {}
        told = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
        pids = {str(peer.pid) for peer in self.peers.values()}
        sent = {}
        for line in told.splitlines():
            pid, nbytes = _PID.search(line), _SENT.search(line)
            if pid is not None and nbytes is not None and pid[1] in pids:
                sent[" ".join(line.split()[3:5])] = int(nbytes[1])
        return sent

    def settled(self, before: Counts) -> Counts:
        """Return what was counted when somebody had gained an entry for the last time since ``before``."""
        last = self.counts()
        until = last.at + _SETTLE_S
        while True:
            time.sleep(_STEADY_S / 6)
            now = self.counts()
            if now.gained_since(before) != last.gained_since(before):
                last = now
            elif now.at - last.at > _STEADY_S:
                return last
            if now.at > until:
                raise BenchError(f"entries still move after {_SETTLE_S:g} s")

    def wait_for_drops(self, n_entries: float) -> None:
        """Wait until nobody keeps entries any more that have come to others: so many are left."""
        until = time.monotonic() + _SETTLE_S
        while sum(self.counts().entries.values()) > n_entries:
            if time.monotonic() > until:
                raise BenchError(f"there are more than {n_entries:.0f} entries {_SETTLE_S:g} s after a join")
            time.sleep(_STEADY_S / 6)

    def lose_last(self) -> None:
        """Kill the member that came last: it has published nothing, so that no page is lost with it."""
        self.peers.popitem()[1].kill()

    def finds_all(self, owners: Sequence[str]) -> bool:
        """Whether some members find pages of ``owners``, all of them."""
        readers = list(self.peers.values())[:: max(1, len(self.peers) // _READERS)][:_READERS]
        for peer in readers:
            peer.send("look_up", owners=list(owners), n_pages=_PROMPT)
        answers = [peer.answer() for peer in readers]
        return all(answer["found"] == answer["asked"] for answer in answers)

    def close(self) -> None:
        """End all at once."""
        for peer in [*self.peers.values(), *self._spare]:
            peer.kill()
        self._undo.close()


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Run a cluster of each of the plan's sizes."""
    for n in plan.processes:
        with Meeting() as meeting:
            crowd = Crowd(meeting, plan)
            try:
                for case, unit, values in _figures(crowd, n, plan):
                    yield make_row(
                        {"p2pkv": values}, suite="processes", case=f"{n} processes: {case}", unit=unit
                    )
            finally:
                crowd.close()


Figure = tuple[str, str, list[float]]


def _figures(crowd: Crowd, n: int, plan: Plan) -> Iterator[Figure]:
    plan.tell(f"{n} processes are started")
    crowd.spawn(n + 1)
    yield "all started at once see all after", "s", [crowd.start(n)]
    plan.tell(f"{n} processes publish")
    empty = crowd.counts()
    crowd.publish()
    before = crowd.settled(empty)
    entries = [each for each in before.entries.values() if each]
    yield (
        "entries of the fullest, as a multiple of the mean",
        "x",
        [max(entries) * len(entries) / sum(entries)],
    )
    yield from _look_ups(crowd, plan)
    yield from _idle(crowd, n, plan)
    yield from _levels(crowd)
    yield from _join(crowd, plan)
    yield from _loss(crowd, plan)


def _look_ups(crowd: Crowd, plan: Plan) -> Iterator[Figure]:
    plan.tell("look-ups")
    names = list(crowd.peers)
    reader, owners = crowd.peers[names[0]], names[1 : 1 + _PROMPTS]
    asked = [float(reader.call("owners_of", owner=owner, n_pages=_PROMPT)) for owner in owners]
    yield f"members that hold the entries of {_PROMPT} pages", "", asked
    before = crowd.counts()
    first = [_look_up(reader, owner) for owner in owners]
    after = crowd.counts()
    yield f"a first look-up of {_PROMPT} pages", "ms", first
    yield "requests of a first look-up, to all others", "", [(after.requests - before.requests) / len(owners)]
    yield "the same pages again", "ms", [_look_up(reader, owner) for owner in owners]


def _look_up(reader: Peer, owner: str) -> float:
    answer = reader.call("look_up", owners=[owner], n_pages=_PROMPT)
    if answer["found"] != answer["asked"]:
        raise BenchError(f"{answer['found']} of {answer['asked']} pages of {owner} were found")
    return float(answer["ms"])


def _idle(crowd: Crowd, n: int, plan: Plan) -> Iterator[Figure]:
    plan.tell("nothing is asked")
    before = crowd.counts()
    time.sleep(_IDLE_S)
    after = crowd.counts()
    seconds = after.at - before.at
    # who asks for the counts asks over pipes, which are none of these
    yield "requests a member answers while idle", "/s", [(after.requests - before.requests) / seconds / n]
    if after.sent:
        yield "bytes a member sends while idle", "B/s", [after.sent_since(before) / seconds / n]


def _levels(crowd: Crowd) -> Iterator[Figure]:
    levels = [_level(peer.pid) for peer in crowd.peers.values()]
    for index, (case, unit) in enumerate(
        (
            ("resident memory a process", "MiB"),
            ("of it, its part of what several map", "MiB"),
            ("threads a process", ""),
            ("descriptors a process", ""),
        )
    ):
        yield case, unit, [level[index] for level in levels]


def _level(pid: int) -> tuple[float, float, float, float]:
    proc = Path(f"/proc/{pid}")
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", (proc / "smaps_rollup").read_text(), re.MULTILINE))
    counted = [float(sum(1 for _ in (proc / what).iterdir())) for what in ("task", "fd")]
    return float(sizes["Rss"]) / 1024, float(sizes["Pss"]) / 1024, counted[0], counted[1]


def _join(crowd: Crowd, plan: Plan) -> Iterator[Figure]:
    plan.tell("one joins")
    before = crowd.counts()
    yield "all see one that joins after", "s", [crowd.start(1)]
    yield from _moved(crowd, before, "a join")
    crowd.wait_for_drops(sum(before.entries.values()))


def _loss(crowd: Crowd, plan: Plan) -> Iterator[Figure]:
    plan.tell("one is killed")
    before = crowd.counts()
    killed = time.monotonic()
    crowd.lose_last()
    owners = list(crowd.peers)[-_PROMPTS:]
    while not crowd.finds_all(owners):
        if time.monotonic() > killed + _SETTLE_S:
            raise BenchError("pages of others are not found after a loss")
    yield "all pages are found again after a kill", "s", [time.monotonic() - killed]
    yield "all know of a kill after", "s", [crowd.wait_for_all() - killed]
    yield from _moved(crowd, before, "a kill")


def _moved(crowd: Crowd, before: Counts, what: str) -> Iterator[Figure]:
    """Say what it took until entries had settled; what an idle cluster sends in as long is a part of it."""
    after = crowd.settled(before)
    gained, total = after.gained_since(before), sum(before.entries.values())
    yield f"entries that moved by {what}", "", [gained]
    yield f"the same, of all entries, by {what}", "%", [100 * gained / total]
    yield f"entries were settled after {what}", "s", [after.at - before.at]
    yield f"requests of all members until then, by {what}", "", [after.requests - before.requests]
    if after.sent:
        yield f"kilobytes that all sent until then, by {what}", "kB", [after.sent_since(before) / 1e3]
