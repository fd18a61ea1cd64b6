"""Who finds which pages how often, and what each of them may have of the room for hot pages.

A *reader* is this node's own calls, or an engine that is attached to it, of which the node knows no more than what it
says. So the room is divided: what a reader finds most, as far as it fits its part, gives way to nothing that others
find, however often they say so. What nobody else needs is for everybody: a part is no limit while there is room.

With one reader there is nothing to divide, and what is found most often comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

HotPages = Callable[[int, int], list[tuple[bytes, float]]]
"""Returns the pages that calls find most often, at most so many and each seen so many times, with finds a second."""
EngineFinds = Callable[[float, int], list[tuple[int, list[tuple[bytes, float, int]]]]]
"""Returns what each engine finds, by its number, of the pages that all engines together find so often a second or
oftener; some of them if they are more than so many. With finds a second, and from how many looks that is known."""

_MOST = 2048
"""Pages that the sketch of this node's calls may name: all of its two windows."""
_MOST_OF_ENGINES = 8 * _MOST
"""Pages that all engines may name: with more, a turn would hold the interpreter for tens of milliseconds. A guess."""
_MUCH_HOTTER = 2.0
"""Where the share is full, a page takes the place of one that is so many times less hot."""


class Finds:
    """How often a second pages are found, in all and by each reader."""

    def __init__(self, by_reader: Sequence[Mapping[bytes, float]], well_known: Iterable[bytes]) -> None:
        """``well_known``: the pages that were seen often enough for that to be believed."""
        self.by_reader = [rates for rates in by_reader if rates]
        self.n_by_engines = 0
        """Pages that engines say they find."""
        self._well_known = set(well_known)
        self.rates: dict[bytes, float] = {}
        self._readers: dict[bytes, int] = {}
        for number, rates in enumerate(self.by_reader):
            for key, rate in rates.items():
                self.rates[key] = self.rates.get(key, 0.0) + rate
                self._readers[key] = self._readers.get(key, 0) | 1 << number

    def rate(self, key: bytes) -> float:
        """Return finds a second of all readers."""
        return self.rates.get(key, 0.0)

    def readers(self, key: bytes) -> int:
        """Return who finds it, a bit for each reader."""
        return self._readers.get(key, 0)

    def hot(self, rate: float) -> list[bytes]:
        """Return what is found so often or oftener: each reader's pages in their turns, what it finds most first."""
        ranked = [
            sorted((key for key in rates if self.is_hot(key, rate)), key=rates.__getitem__, reverse=True)
            for rates in self.by_reader
        ]
        return list(dict.fromkeys(key for turn in zip_longest(*ranked) for key in turn if key is not None))

    def is_hot(self, key: bytes, rate: float) -> bool:
        """Whether it is found so often or oftener, as far as that is known."""
        return self.rates[key] >= rate and key in self._well_known


def collect(hot_pages: HotPages, engine_finds: EngineFinds, *, least_looks: int, least_rate: float) -> Finds:
    """Ask the sketch, and what engines have said, of pages that together they find ``least_rate`` times a second."""
    by_reader = [dict(hot_pages(_MOST, 1))]
    well_known = {key for key, _ in hot_pages(_MOST, least_looks)}
    looks: dict[bytes, int] = {}
    for _, found in engine_finds(least_rate, _MOST_OF_ENGINES):
        by_reader.append({key: rate for key, rate, _ in found})
        for key, _, n_looks in found:
            looks[key] = looks.get(key, 0) + n_looks
    well_known.update(key for key, n_looks in looks.items() if n_looks >= least_looks)
    finds = Finds(by_reader, well_known)
    finds.n_by_engines = len(looks)
    return finds


class Parts:
    """Each reader's part of the room, and what lies in it. For one turn."""

    def __init__(self, finds: Finds, guests: Mapping[bytes, int], room: int) -> None:
        """``guests``: the pages that are here for being hot, with their bytes; ``room``: what they may have."""
        self._finds = finds
        self._part = room // max(1, len(finds.by_reader))
        self._used: list[int] = []
        self._n_due = 0
        keepers: dict[bytes, int] = {}
        for number, rates in enumerate(finds.by_reader):
            used = 0
            for key in sorted(rates.keys() & guests.keys(), key=rates.__getitem__, reverse=True):
                used += guests[key]
                if used <= self._part:
                    keepers[key] = keepers.get(key, 0) | 1 << number
            self._used.append(used)
        # by whose parts they lie in, the coolest first
        self._guests: dict[int, deque[tuple[bytes, int]]] = {}
        for key in sorted(guests, key=finds.rate):
            self._guests.setdefault(keepers.get(key, 0), deque()).append((key, guests[key]))

    def in_turn(self, wanted: Sequence[bytes], block: int) -> list[bytes]:
        """Return these, the ones first that fit somebody's part if each of them takes ``block`` bytes."""
        used = list(self._used)
        due: list[bytes] = []
        rest: list[bytes] = []
        for key in wanted:
            mine = [number for number in range(len(used)) if self._finds.readers(key) >> number & 1]
            (due if any(used[number] + block <= self._part for number in mine) else rest).append(key)
            for number in mine:
                used[number] += block
        self._n_due = len(due)
        return due + rest

    def make_room(
        self, wanted: Sequence[bytes], free: int, block: int, most: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Say which guests are to go, and which of ``wanted`` come in their place: ``most`` of them.

        ``wanted`` is what :meth:`in_turn` has returned, and ``free`` what is left of the room. None goes but where what
        goes makes room for a whole page, for one that may come now. How long that will be is not known: it is taken to
        be as long as the longest of the guests, whose ``block`` this is.
        """
        going: list[bytes] = []
        coming: list[bytes] = []
        for index, key in enumerate(wanted):
            if len(coming) >= most:
                break
            together: list[tuple[deque[tuple[bytes, int]], tuple[bytes, int]]] = []
            while free < block and (queue := self._coolest(key, is_due=index < self._n_due)) is not None:
                guest = queue.popleft()
                together.append((queue, guest))
                free += guest[1]
            if free < block:
                for queue, guest in reversed(together):
                    queue.appendleft(guest)
                    free -= guest[1]
                continue
            free -= block
            going += [guest[0] for _, guest in together]
            coming.append(key)
        return going, coming

    def _coolest(self, key: bytes, *, is_due: bool) -> deque[tuple[bytes, int]] | None:
        """Return whose first guest goes for this page, before all others: none but of who finds the page too."""
        finds, found, coolest = self._finds, None, 0.0
        for keepers, queue in self._guests.items():
            if not queue or keepers & ~finds.readers(key):
                continue
            rate = finds.rate(queue[0][0])
            may_go = (is_due and not keepers) or finds.rate(key) >= _MUCH_HOTTER * rate
            if may_go and (found is None or rate < coolest):
                found, coolest = queue, rate
        return found
