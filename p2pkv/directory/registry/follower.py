"""Knows what lies in a store: lists it once, follows its changes, and lists it again whenever one may have been missed.

Versions decide, not the order of arrival: what comes twice or late changes nothing. A stream that breaks, a gap, and a
silence that lasts too long all end in a new list, which is the truth whatever came before. While the store is away the
last that was known stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import itemgetter
from random import Random

from p2pkv.directory.registry.store import Change, Contents, Entry, GapError, Listing, Store
from p2pkv.errors import RegistryError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

CALL_S = 2.0
"""What one call may take; a store that answers at all does so in milliseconds."""
_LIST_S = 5.0
"""What a list of everything may take, all its pages: of 4,096 records it is some megabytes, and paths may be slow."""
QUIET_S = 120.0
"""After such a silence everything is read again: a server that hangs says as little as one that knows nothing new."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Between attempts at a store that does not answer; doubled each time, and with jitter."""
_SETTLED_S = 5.0
"""A stream that has lived for so long, or brought news, was none that a server, or a proxy before it, ends at once."""
_MOST_GONE = 4096
"""Removals that are remembered, lest a change that comes late bring a record back: as many as a view has members."""


class Follower:
    """Turns what a store tells into a :class:`Listing`. Each :meth:`step` is one turn of its owner's thread."""

    def __init__(
        self,
        store: Store,
        where: str,
        clock: Callable[[], float],
        random: Random,
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._where = where
        self._clock = clock
        self._random = random
        self._on_change = on_change
        self._entries: dict[str, Entry] = {}
        self._gone: dict[str, int] = {}  # versions of the removals since the last list
        self._version = 0
        self._is_following = False
        self._heard_at = clock()
        self._followed_at = clock()
        self._pause = FIRST_PAUSE_S
        self._in_a_row = 0
        self._n_short_lived = 0  # streams in a row that ended before they had settled
        self._limited = LimitedLog(_log, clock=clock)
        self.listing = Listing({})
        """What is known; replaced whole, so that any thread may read it."""
        self.is_closing = False
        """Set by its owner, whose interruption is no failure of the store."""
        self.n_lists = self.n_failures = self.n_gaps = 0

    def read_all(self, timeout: float) -> None:
        """Read everything now. Raises :class:`RegistryError`."""
        contents = self._store.read_all(timeout)
        self._replace(contents)
        self._store.watch(contents.version, min(timeout, CALL_S))
        self._is_following = True
        self._heard_at = self._followed_at = self._clock()
        self._show(is_current=True)
        if (
            not self._n_short_lived
        ):  # else a list that is answered says little: the stream may end at once again
            self._settle()

    @property
    def is_up(self) -> bool:
        """Whether the store answers, and its streams last: else newcomers are found with delay. For any thread."""
        return self.listing.is_current and (self._n_short_lived < 2 or self._has_lasted())

    def step(self, timeout: float) -> float:
        """List, or wait up to ``timeout`` seconds for changes; return the seconds to wait before the next step."""
        try:
            if not self._is_following:
                was_away = not self.listing.is_current and self.n_lists > 0
                self.read_all(_LIST_S)
                if was_away and self._n_short_lived < 2:
                    _log.info("%s answers again; %d records are there", self._where, len(self._entries))
                return 0.0
            changes = self._store.changes(timeout)
        except GapError as error:
            self.n_gaps += 1
            return self._failed(error)
        except RegistryError as error:
            self.n_failures += 1
            return self._failed(error)
        now = self._clock()
        if changes is not None:
            self._heard_at = now
            if sum(self._apply(change) for change in changes):
                self._settle()
                self._show(is_current=True)
        elif now - self._heard_at >= QUIET_S:
            self._is_following = False
        return 0.0

    def _has_lasted(self) -> bool:
        return self._is_following and self._clock() - self._followed_at >= _SETTLED_S

    def _settle(self) -> None:
        self._pause, self._in_a_row, self._n_short_lived = FIRST_PAUSE_S, 0, 0

    def _failed(self, error: RegistryError) -> float:
        if self._has_lasted():
            self._settle()
        elif self._is_following or isinstance(error, GapError):
            self._n_short_lived += 1
        self._in_a_row += 1
        self._is_following = False
        if self.is_closing:
            return 0.0
        if self._in_a_row == 1 and self.listing.is_current:
            _log.info("%s; everything is listed again", error)
            return self._random.uniform(
                0.0, FIRST_PAUSE_S
            )  # another server may do, and all nodes come at once
        if self.listing.is_current:
            self._show(is_current=False)
        self._limited.warning(
            "reading",
            "membership can't be read: %s; this node goes on with the members it knows, and newcomers are found when "
            "it answers",
            error,
        )
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        return pause * self._random.uniform(0.5, 1.0)

    def _replace(self, contents: Contents) -> None:
        self.n_lists += 1
        self._entries = dict(contents.entries)
        self._gone.clear()
        self._version = contents.version

    def _apply(self, change: Change) -> bool:
        known = self._entries.get(change.name)
        last = max(self._version, known.version if known else 0, self._gone.get(change.name, 0))
        if change.version <= last:
            return False
        if change.value is None:
            self._gone[change.name] = change.version
            if len(self._gone) > _MOST_GONE:
                self._forget_the_gone()
            return self._entries.pop(change.name, None) is not None
        self._entries[change.name] = Entry(change.value, change.version)
        return True

    def _forget_the_gone(self) -> None:
        """Forget the older half of the removals: from now on no change as old as these counts, whatever its name."""
        for name, version in sorted(self._gone.items(), key=itemgetter(1))[: _MOST_GONE // 2]:
            del self._gone[name]
            self._version = max(self._version, version)

    def _show(self, *, is_current: bool) -> None:
        values = {name: entry.value for name, entry in self._entries.items()}
        if values != self.listing.values or is_current != self.listing.is_current:
            self.listing = Listing(values, is_current)
            self._on_change()
