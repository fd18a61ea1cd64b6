"""What the members' answers come to: where a page is, or why it is not there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from p2pkv.explain.events import PageEvent
from p2pkv.explain.messages import Answer, Page
from p2pkv.explain.namespaces import Difference, differences


class Verdict(Enum):
    """Where the page is, or the youngest reason why it is nowhere."""

    IN_POOL = "in_pool"
    ON_DISK = "on_disk"
    EVICTED = "evicted"
    RETRACTED = "retracted"
    CLEARED = "cleared"
    BUMPED = "bumped"
    DAMAGED = "damaged"
    NOT_TAKEN = "not_taken"
    OWNER_GONE = "owner_gone"
    OTHER_NAMESPACE = "other_namespace"
    UNKNOWN = "unknown"
    """No node that answered has it or remembers it."""


_OF_EVENT = {
    PageEvent.EVICTED: Verdict.EVICTED,
    PageEvent.EVICTED_FROM_DISK: Verdict.EVICTED,
    PageEvent.RETRACTED: Verdict.RETRACTED,
    PageEvent.TAKEN_FROM_DISK: Verdict.RETRACTED,
    PageEvent.CLEARED: Verdict.CLEARED,
    PageEvent.DISK_CLEARED: Verdict.CLEARED,
    PageEvent.BUMPED: Verdict.BUMPED,
    PageEvent.BAD_ON_DISK: Verdict.DAMAGED,
    PageEvent.NO_ROOM: Verdict.NOT_TAKEN,
    PageEvent.TOO_LATE: Verdict.NOT_TAKEN,
}
_SAME_MOMENT_S = 1.0
"""A disk is cleared within less of the bump that clears it; a page that is only there is not told why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node that has the page."""

    node_id: str
    medium: str
    nbytes: int
    stored_at: float | None
    """Seconds since 1970; None: before anything that the node remembers."""
    is_told: bool
    """Some node's part of the directory leads to it. Otherwise readers miss it until it is told again."""


@dataclass(frozen=True, slots=True)
class Happening:
    """What became of the page once, at one node."""

    at: float
    node_id: str
    event: PageEvent
    about: str
    namespace: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of one page."""

    key: str
    namespace: str
    epoch: int
    page_id: str
    """In hexadecimal digits; empty if each node was asked in its own namespace."""
    verdict: Verdict
    places: tuple[Place, ...]
    happenings: tuple[Happening, ...]
    """The oldest first."""
    owners_gone: tuple[str, ...]
    """Nodes that the directory leads to, and that are no members in that boot."""
    elsewhere: tuple[tuple[str, Difference], ...]
    """Nodes that have it in another namespace, and how that differs."""
    answered: tuple[str, ...]
    silent: tuple[str, ...]
    """Members that did not answer in time, or are too old to: they may have it."""
    remembers_since: float
    """Seconds since 1970: what went before, some node that answered has forgotten."""


def explain(
    key: str, answers: Sequence[Answer], silent: Collection[str], *, everywhere: bool = False
) -> Explanation:
    """Put together what was answered; the first answer says which page is meant.

    ``everywhere``: each node's is meant, in its own namespace.
    """
    asked = answers[0].pages[0]
    current = [
        (answer, page)
        for answer in answers
        for page in answer.pages
        if page.id == asked.id or (everywhere and page.is_current)
    ]
    meant = {page.id for _, page in current}
    places = tuple(sorted(_places(current), key=lambda place: place.node_id))
    happenings = tuple(sorted(_happenings(answers, current), key=lambda h: (h.at, h.epoch)))
    there = {answer.node_id for answer, page in current if page.medium}
    # by owner, and when the directory dropped what it had of it: it is about to
    gone = {h.about: h.at for h in happenings if h.event is PageEvent.OWNER_GONE}
    lost = [e for _, page in current for e in page.entries if e.is_live and not e.is_counting]
    gone |= dict.fromkeys((entry.owner for entry in lost), math.inf)
    owners_gone = {owner: at for owner, at in gone.items() if owner not in there}
    elsewhere = tuple(
        (answer.node_id, differences(asked.namespace, page.namespace))
        for answer in answers
        for page in answer.pages
        if page.is_current and page.medium and page.id not in meant
    )
    epochs = {page.epoch for answer in answers for page in answer.pages}
    return Explanation(
        key=key,
        namespace=asked.namespace if len(meant) == 1 else "",
        epoch=asked.epoch if len(meant) == 1 else 0,
        page_id=asked.id.hex() if len(meant) == 1 else "",
        verdict=_verdict(places, happenings, owners_gone, elsewhere, epochs),
        places=places,
        happenings=happenings,
        owners_gone=tuple(sorted(owners_gone)),
        elsewhere=elsewhere,
        answered=tuple(sorted(answer.node_id for answer in answers)),
        silent=tuple(sorted(silent)),
        remembers_since=max((max(a.remembers_since, default=0.0) for a in answers), default=0.0),
    )


def _places(current: Sequence[tuple[Answer, Page]]) -> Iterator[Place]:
    told = {e.owner for _, page in current for e in page.entries if e.is_live and e.is_counting}
    for answer, page in current:
        if page.medium:
            node_id = answer.node_id
            yield Place(node_id, page.medium, page.nbytes, page.stored_at, node_id in told)


def _happenings(answers: Sequence[Answer], current: Sequence[tuple[Answer, Page]]) -> Iterator[Happening]:
    earlier = [(a, page) for a in answers for page in a.pages if not page.is_current]
    known = set(PageEvent)
    for answer, page in [*current, *earlier]:
        for event in reversed(
            page.events
        ):  # the youngest comes first, and a clock may tell two the same time
            if event.event in known:
                kind = PageEvent(event.event)
                yield Happening(event.at, answer.node_id, kind, event.about, page.namespace, page.epoch)


def _verdict(
    places: Sequence[Place],
    happenings: Sequence[Happening],
    owners_gone: Mapping[str, float],
    elsewhere: Sequence[tuple[str, Difference]],
    epochs: Collection[int],
) -> Verdict:
    if any(place.medium == "pool" for place in places):
        return Verdict.IN_POOL
    if places:
        return Verdict.ON_DISK
    departures = [h for h in happenings if h.event.is_departure]
    if owners_gone and (not departures or max(owners_gone.values()) >= departures[-1].at):
        return Verdict.OWNER_GONE
    if departures:
        return _of_departure(departures[-1], epochs)
    return Verdict.OTHER_NAMESPACE if elsewhere else Verdict.UNKNOWN


def _of_departure(last: Happening, epochs: Collection[int]) -> Verdict:
    is_cleared = last.event is PageEvent.DISK_CLEARED
    # a bump clears the disk; an epoch is the time of its bump
    if is_cleared and any(abs(last.at - e / 1e9) < _SAME_MOMENT_S for e in epochs if e > last.epoch):
        return Verdict.BUMPED
    return _OF_EVENT[last.event]
