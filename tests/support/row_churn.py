"""Both ends of the hunt for torn rows: one offers rows of device memory and overwrites them, the other checks them.

Either may be killed at any moment, so that what they have seen is noted in a file, which outlives them.
"""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_buffers import DeviceBuffer
from p2pkv import Node
from p2pkv.transfers import Offer, RowStatus

N_ROWS = 32
"""Rows of a request."""
N_PLACES = 4
"""So many requests are offered at a time: the next one has the place of the oldest."""
POISON = 0xA5
"""No row that is offered is made of it."""
_WAITS_S = (0.0005, 0.01, 0.5, 0.5)
_LEASES_S = (0.02, 1.0, 1.0)
"""However long copies take here, some are waited for, and some are overtaken."""
_NOTES = ("over", "offered", "granted", "right", "not OK", "wrong", "written late")


class Notes:
    """Numbers by their names, which no killing undoes. Each has one writer; ``over`` is the supervisor's."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(_NOTES)))
        self._numbers = np.memmap(path, np.uint64, "r+", shape=len(_NOTES))

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[_NOTES.index(name)])

    def __setitem__(self, name: str, number: int) -> None:
        self._numbers[_NOTES.index(name)] = number

    @property
    def is_broken(self) -> bool:
        return self["wrong"] + self["written late"] > 0


def rows_of(seed: int, request: str, nbytes: int) -> NDArray[np.uint8]:
    """Return the rows of a request: numbers that count up from a random one of each row."""
    chance = np.random.default_rng([seed, zlib.crc32(request.encode())])
    first = chance.integers(2**63, size=(N_ROWS, 1), dtype=np.uint64)
    return (first + np.arange(nbytes // 8, dtype=np.uint64)).view(np.uint8)


def offer_rows(
    node: Node, kind: type[DeviceBuffer], to: str, notes: Notes, *, seed: int, nbytes: int
) -> None:
    """Offer, and put where ``to`` grants, until it is over; what had a place is withdrawn, and overwritten at once."""
    chance = random.Random(f"{seed} offers from {notes['offered']}")
    places = [kind(N_ROWS * nbytes) for _ in range(N_PLACES)]
    memories = [node.register_memory(place.array, readable=True) for place in places]
    offers: list[Offer | None] = [None] * N_PLACES
    order, put = np.arange(N_ROWS), 0
    while not notes["over"]:
        number, granted = notes["offered"] + 1, notes["granted"]
        i = number % N_PLACES
        is_put = granted > put and chance.random() < 0.5
        request = f"granted {granted}" if is_put else f"offered {number}"
        rows = rows_of(seed, request, nbytes)
        if (offer := offers[i]) is not None:
            offer.wait(chance.choice(_WAITS_S))
            offer.withdraw()
        if chance.random() < 0.02:
            memories[i].close()
            places[i].write(np.full(N_ROWS * nbytes, POISON, np.uint8))
            memories[i] = node.register_memory(places[i].array, readable=True)
        places[i].write(rows)
        spans, lease = _spans(places[i], order, nbytes), chance.choice(_LEASES_S)
        if is_put:
            put = granted  # a second put of it is refused as long as the first is there
            offers[i] = node.transfers.put_async(to, request, spans, lease=lease)
        else:
            offers[i] = node.transfers.offer(request, spans, lease=lease)
        notes["offered"] = number
    for memory, place in zip(memories, places, strict=True):
        memory.close()
        place.close()


def take_rows(
    node: Node, kind: type[DeviceBuffer], source: str, notes: Notes, *, seed: int, nbytes: int
) -> dict[str, Any]:
    """Get, and grant, until it is over; say what is wrong with the first rows that are OK and not right, if any."""
    chance = random.Random(f"{seed} takes from {notes['offered']}")
    place = kind(N_ROWS * nbytes)
    memory = node.register_memory(place.array)
    order = list(range(N_ROWS))
    found = ""
    while not notes["over"] and not found:
        chance.shuffle(order)  # so that rows are copies of their own
        spans = _spans(place, np.array(order), nbytes)
        timeout = chance.choice(_LEASES_S)
        if chance.random() < 0.5:
            number = notes["granted"] + 1
            request = f"granted {number}"
            grant = node.transfers.grant(request, spans, timeout=timeout)
            notes["granted"] = number
        else:
            request = f"offered {max(1, notes['offered'] - chance.randrange(N_PLACES + 1))}"
            grant = node.transfers.get_async(source, request, spans, timeout=timeout)
        grant.wait(chance.choice(_WAITS_S))
        got = grant.revoke()
        here = place.read().reshape(N_ROWS, nbytes)[order]
        is_ok = got == RowStatus.OK
        is_wrong = is_ok & (here != rows_of(seed, request, nbytes)).any(axis=1)
        notes["right"] += int(np.count_nonzero(is_ok & ~is_wrong))
        notes["not OK"] += int(np.count_nonzero(~is_ok))
        notes["wrong"] += int(np.count_nonzero(is_wrong))
        if is_wrong.any():
            row = int(np.flatnonzero(is_wrong)[0])
            found = (
                f"row {row} of the request {request!r} is OK, and begins with {here[row, :16].tobytes()!r}"
            )
        elif chance.random() < 0.3:
            found = _written_late(place, request, chance.uniform(0, 0.003))
            notes["written late"] += bool(found)
    memory.close()
    place.close()
    return {"found": found, "counters": node.counters()}


def _written_late(place: DeviceBuffer, request: str, seconds: float) -> str:
    """Give memory whose grant is revoked to somebody else for a while; say if it was written to meanwhile."""
    place.write(np.full(place.nbytes, POISON, np.uint8))
    time.sleep(seconds)
    late = np.flatnonzero(place.read() != POISON)
    return f"byte {late[0]} was written when the request {request!r} was revoked" if late.size else ""


def _spans(place: DeviceBuffer, order: NDArray[np.intp], nbytes: int) -> NDArray[np.int64]:
    spans = np.full((N_ROWS, 2), nbytes, np.int64)
    spans[:, 0] = place.address + order * nbytes
    return spans
