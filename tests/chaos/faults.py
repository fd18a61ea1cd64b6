"""How each kind of fault is done, and undone.

| kind | what befalls |
|---|---|
| ``kill`` | SIGKILL; started again with the same id and, if there is an ``amount``, its wall clock that far off |
| ``stop`` | SIGSTOP, then SIGCONT |
| ``starve`` | a process runs 20 of every 100 ms |
| ``hold`` | something in the process keeps the interpreter's lock |
| ``clock`` | its wall clock jumps by ``amount`` and stays so |
| ``cut`` | two places don't hear each other; others hear both |
| ``oneway`` | the second does not hear the first |
| ``split`` | these nodes and the rest don't hear each other |
| ``unplug`` | a place's cable is out |
| ``slow`` | what a place sends has to go through 3 Mbit/s |
| ``reset`` | all TCP connections of a place are reset, again and again |
| ``full`` | a node's disk is full |
| ``descriptors`` | a process can have ``amount`` more descriptors |
| ``end`` | closes what it has and ends, as told; started again |
| ``drain`` | a host's node hands its pages over, and ends; started again |
| ``keeper`` | a host's keeper is killed, and started again while the node lives |
| ``etcd`` | etcd is killed, and started again |
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Protocol

from .fleet import Fleet
from .hosts import Hosts
from .processes import Processes
from .schedule import Event

_STARVED_S, _FED_S = 0.08, 0.02
_RESET_EVERY_S = 0.4

Undo = Callable[[], None]


class Told(Protocol):
    """Is told what is about to be done to a process, by its number."""

    def killed(self, number: int) -> None: ...
    def ends(self, number: int) -> None: ...


def begin(event: Event, fleet: Processes, told: Told) -> Undo:
    """Do a fault; return what ends it."""
    if event.kind in _NETWORK:
        return _NETWORK[event.kind](event, fleet)
    if event.kind == "kill":
        return _kill(event, fleet, told)
    if event.kind in _ENDS:
        return _end(event, fleet, told)
    return _PROCESS[event.kind](event, fleet)


def _kill(event: Event, fleet: Processes, told: Told) -> Undo:
    (node,) = event.nodes
    told.killed(node)
    fleet.kill(node)
    if event.amount:
        fleet.set_next_clock(node, event.amount)
    return lambda: fleet.start(node)


def _end(event: Event, fleet: Processes, told: Told) -> Undo:
    (node,) = event.nodes
    told.ends(node)
    fleet.tell(node, do=event.kind)

    def start() -> None:
        fleet.kill(node)  # if it has not ended by now
        fleet.start(node)

    return start


def _keeper(event: Event, fleet: Processes) -> Undo:
    assert isinstance(fleet, Hosts)
    (host,) = event.nodes
    fleet.kill_keeper(host)
    return lambda: fleet.start_keeper(host)


def _etcd(event: Event, fleet: Processes) -> Undo:
    assert isinstance(fleet, Hosts)
    fleet.etcd.kill()
    return fleet.etcd.start


def _stop(event: Event, fleet: Processes) -> Undo:
    (node,) = event.nodes
    fleet.signal(node, signal.SIGSTOP)
    return lambda: fleet.signal(node, signal.SIGCONT)


def _starve(event: Event, fleet: Processes) -> Undo:
    (node,) = event.nodes

    def starve(over: threading.Event) -> None:
        while not over.is_set():
            fleet.signal(node, signal.SIGSTOP)
            over.wait(_STARVED_S)
            fleet.signal(node, signal.SIGCONT)
            over.wait(_FED_S)

    return _until_over(starve)


def _hold(event: Event, fleet: Processes) -> Undo:
    (node,) = event.nodes
    fleet.tell(node, do="hold", s=event.lasts)
    return _nothing


def _clock(event: Event, fleet: Processes) -> Undo:
    (node,) = event.nodes
    fleet.shift_clock(node, event.amount)
    return _nothing


def _full(event: Event, fleet: Processes) -> Undo:
    assert isinstance(fleet, Fleet)
    (node,) = event.nodes
    fleet.fill_disk(node)
    return lambda: fleet.empty_disk(node)


def _descriptors(event: Event, fleet: Processes) -> Undo:
    (node,) = event.nodes
    if not fleet.is_running(node):
        return _nothing
    before = fleet.limit_descriptors(node, int(event.amount))
    return lambda: fleet.give_descriptors(node, before)


def _ways(event: Event, fleet: Processes) -> list[tuple[int, int]]:
    """Return the ways between places that a fault of the network closes."""
    places = [fleet.place(node) for node in event.nodes]
    if event.kind == "split":
        inside = set(places)
        outside = set(range(fleet.network.n_places)) - inside
        return [way for a in inside for b in outside for way in ((a, b), (b, a))]
    one, other = places
    if one == other:
        return []
    return [(one, other)] if event.kind == "oneway" else [(one, other), (other, one)]


def _cut(event: Event, fleet: Processes) -> Undo:
    ways = _ways(event, fleet)
    for way in ways:
        fleet.network.cut(*way)

    def heal() -> None:
        for way in ways:
            fleet.network.heal(*way)

    return heal


def _unplug(event: Event, fleet: Processes) -> Undo:
    place = fleet.place(event.nodes[0])
    fleet.network.plug(place, is_in=False)
    return lambda: fleet.network.plug(place, is_in=True)


def _slow(event: Event, fleet: Processes) -> Undo:
    place = fleet.place(event.nodes[0])
    fleet.network.slow(place, is_slow=True)
    return lambda: fleet.network.slow(place, is_slow=False)


def _reset(event: Event, fleet: Processes) -> Undo:
    place = fleet.place(event.nodes[0])

    def reset(over: threading.Event) -> None:
        while not over.is_set():
            fleet.network.reset(place)
            over.wait(_RESET_EVERY_S)

    return _until_over(reset)


def _until_over(run: Callable[[threading.Event], None]) -> Undo:
    """Run something beside the schedule; what is returned stops it and waits for its end."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name="fault", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


def _nothing() -> None:
    """End a fault that ends by itself, or stays."""


_PROCESS = {
    "stop": _stop,
    "starve": _starve,
    "hold": _hold,
    "clock": _clock,
    "full": _full,
    "descriptors": _descriptors,
    "keeper": _keeper,
    "etcd": _etcd,
}
_ENDS = frozenset({"end", "drain"})
_NETWORK = {
    "cut": _cut,
    "oneway": _cut,
    "split": _cut,
    "unplug": _unplug,
    "slow": _slow,
    "reset": _reset,
}
