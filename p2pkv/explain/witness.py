"""What this node says when it is asked about a page: what it has, what its shard knows, and what it remembers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from p2pkv import _native
from p2pkv.directory.view import Member, node_key
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ControlError
from p2pkv.explain.messages import (
    MAX_KEY_BYTES,
    MOST_HOT_PAGES,
    Answer,
    Entry,
    Event,
    HotPage,
    Page,
    Question,
    WorkingSetShare,
    decode,
    encode,
)
from p2pkv.explain.requests import Requests
from p2pkv.metrics.working_set import Share
from p2pkv.page import KEY_BYTES, LOCATION, RESIDENT, Namespace, as_locations, page_key, scopes
from p2pkv.pool import Pool

_MOST_NAMES = 4096
"""Node ids that are remembered for their keys: those who were met last."""


class Witness:
    """Thread-safe. Has no pool before :meth:`know_pool`, and in a node without one."""

    def __init__(
        self,
        node_id: str,
        namespace: Namespace,
        epochs: _native.NamespaceEpochs,
        shard: _native.Shard,
        history: _native.PageHistory,
        requests: Requests,
    ) -> None:
        self._node_id = node_id
        self._namespace = namespace
        self._epochs = epochs
        self._shard = shard
        self._history = history
        self._pool: Pool | None = None
        self._tier: DiskTier | None = None
        self._share: Callable[[], Share] | None = None
        self._hot_pages: Callable[[int], list[tuple[bytes, float]]] = lambda _: []
        self._requests = requests
        self._lock = threading.Lock()  # guards the next one
        self._names: dict[int, str] = {}

    def know_pool(self, pool: Pool, tier: DiskTier | None, share: Callable[[], Share]) -> None:
        """Say from now on what is in these, and what this node's share of the working set is."""
        self._pool, self._tier, self._share = pool, tier, share

    def know_fetches(self, hot_pages: Callable[[int], list[tuple[bytes, float]]]) -> None:
        """Say from now on which pages calls fetch most: at most so many, with fetches a second."""
        self._hot_pages = hot_pages

    def met(self, members: Iterable[Member]) -> None:
        """Remember the names of these nodes, for what is said of them when they are gone."""
        with self._lock:
            for member in members:
                self._names.pop(member.key, None)
                self._names[member.key] = member.node_id
            while len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]

    def answer(self, body: bytes) -> bytes:
        """Answer the body of an EXPLAIN. Raises :class:`~p2pkv.errors.ControlError` for a malformed one."""
        return encode(self.tell(decode(body, Question)))

    def tell(self, question: Question) -> Answer:
        """Say what is known of the page, under every name that it may have here."""
        if question.id is not None and len(question.id) != KEY_BYTES:
            raise ControlError(f"the id of a page has {KEY_BYTES} bytes, not {len(question.id)}")
        if question.key is not None and len(question.key) > MAX_KEY_BYTES:
            raise ControlError(f"a key of {len(question.key)} bytes; at most {MAX_KEY_BYTES}")
        pages = [self._page(*name) for name in self._names_of(question)]
        known = [page for page in pages[1:] if page.medium or page.entries or page.events]
        return Answer(
            node_id=self._node_id,
            namespace=self._namespace.name,
            epoch=self._namespace.epoch,
            pages=(*pages[:1], *known),
            remembers_since=tuple(self._history.reach()),
            working_set=WorkingSetShare(*self._share()) if question.working_set and self._share else None,
            calls=() if question.request is None else self._requests.of(question.request),
            hot_pages=tuple(self._hottest(question.hot_pages)),
        )

    def _hottest(self, most: int) -> Iterator[HotPage]:
        if most > 0:
            for page_id, rate in self._hot_pages(min(most, MOST_HOT_PAGES)):
                yield HotPage(page_id, rate)

    def _names_of(self, question: Question) -> Iterator[tuple[str, int, bytes, bool]]:
        """Yield namespace, epoch and id of what may be meant, and whether calls would look for it now."""
        own, epoch = self._namespace.name, self._namespace.epoch
        if question.id is not None:
            yield "", 0, question.id, True
        if question.key is None:
            return
        asked = own if question.namespace is None else question.namespace
        if asked != own:
            there = self._epochs.greatest(scopes(asked))
            yield asked, there, page_key(asked, question.key, there), True
        yield own, epoch, page_key(own, question.key, epoch), True
        for before in self._namespace.earlier_epochs:
            yield own, before, page_key(own, question.key, before), False

    def _page(self, namespace: str, epoch: int, page_id: bytes, is_current: bool) -> Page:
        medium, nbytes = self._find(page_id)
        return Page(
            namespace=namespace,
            epoch=epoch,
            id=page_id,
            is_current=is_current,
            medium=medium,
            nbytes=nbytes,
            stored_at=self._history.stored_at(page_id) if medium else None,
            entries=tuple(self._entries(page_id)),
            events=tuple(
                Event(at, event, self._name(about)) for at, event, about in self._history.find(page_id)
            ),
        )

    def _find(self, page_id: bytes) -> tuple[str, int]:
        if self._pool is None:
            return "", 0
        ids = np.frombuffer(page_id, np.uint8).reshape(1, KEY_BYTES)
        found, locations = self._pool.lookup(ids)
        if found[0]:
            return "pool", int(locations["length"][0])
        if self._tier is not None:
            found, locations = self._tier.locate(ids)
            if found[0]:
                is_back = bool(locations["flags"][0] & RESIDENT)
                return "pool" if is_back else "disk", int(locations["length"][0])
        return "", 0

    def _entries(self, page_id: bytes) -> Iterator[Entry]:
        for raw, age, is_live, is_counting in self._shard.entries_of(page_id):
            location = as_locations(np.frombuffer(raw, np.uint8).reshape(1, LOCATION.itemsize))[0]
            yield Entry(
                owner=self._name(int(location["owner"])),
                is_resident=bool(location["flags"] & RESIDENT),
                is_live=is_live,
                is_counting=is_counting,
                age=float(age),
                nbytes=int(location["length"]),
            )

    def _name(self, key: int) -> str:
        if key in (0, node_key(self._node_id)):
            return "" if key == 0 else self._node_id
        with self._lock:
            return self._names.get(key, f"{key:016x}")
