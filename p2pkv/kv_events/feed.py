"""Tells what a node has: every change of its pool and its disk, in order, in batches, from a thread of its own.

Pool and disk note each change natively, under the lock under which they make it (``native/src/page/change_log.h``); so
the last event of a page says what became of it. Where the order was lost, because more changed than the log holds or
somebody missed more than is kept, everything is told again: ``AllBlocksCleared``, then a listing of what is there, then
what has changed since the listing began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.disk.tier import DiskTier
from p2pkv.kv_events import messages
from p2pkv.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Hashes
from p2pkv.kv_events.publisher import EventPublisher
from p2pkv.limited_log import LimitedLog
from p2pkv.page import Keys
from p2pkv.pool import Pool

_log = logging.getLogger(__name__)

LOG_CAPACITY = 1 << 18
"""Changes that wait to be told: a quarter of a second at a million a second, 4.5 MiB. A guess; not tuned."""
_BATCH = 1024
"""Keys of a message: 20 KiB."""
_TURN_S = 0.01
"""How long changes are gathered, and requests for a replay wait at most."""
_RETELL_S = 1.0
"""At least between two times that everything is told because somebody asked, so that no asker makes it a storm."""
_MEDIA = (messages.MEMORY, messages.DISK)
Follower = Callable[[str, str, Sequence[bytes]], None]
"""Takes an event's name, its medium and its keys; of ``AllBlocksCleared`` the name alone."""


class EventFeed:
    """Runs from :meth:`start` to :meth:`close`. ``epoch`` returns that of the node's namespace."""

    def __init__(
        self,
        publisher: EventPublisher,
        changes: _native.ChangeLog,
        pool: Pool,
        tier: DiskTier | None,
        epoch: Callable[[], int],
        *,
        hashes: Hashes = Hashes.BYTES,
    ) -> None:
        """Take over ``publisher``; ``changes`` must be what ``pool`` and ``tier`` were made with.

        ``hashes`` says what subscribers get; followers in this process get keys.
        """
        self._publisher = publisher
        self._changes = changes
        self._pool = pool
        self._tier = tier
        self._epoch = epoch
        self._hashes = hashes
        self._log = LimitedLog(_log)
        # Used by the thread only.
        self._told_epoch = epoch()
        self._is_lost = True  # from the beginning: a subscriber may know of an earlier run
        self._is_asked = False
        self._next_retelling = 0.0
        self._n_told = 0
        self._n_retold = 0
        self._followers: tuple[Follower, ...] = ()  # replaced as one, by any thread
        self._n_followed = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pkv-kv-events", daemon=True)

    def start(self) -> None:
        """Begin with all that is there."""
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where events are published, with the port that was taken."""
        return self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where missed batches are asked for, if anywhere."""
        return self._publisher.replay_endpoint

    def follow(self, follower: Follower) -> None:
        """Have ``follower`` told too, from everything that is there on; on this feed's thread, so it must not block."""
        self._followers = (*self._followers, follower)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                message = "telling KV events failed; all that is there is told again"
                self._log.error(type(error).__name__, message, exc_info=error)
                self._is_lost = True
                self._closing.wait(_RETELL_S)
        try:
            # who follows need not learn from membership that nothing of this can be read any more
            self._publisher.finish(messages.encode([AllBlocksCleared()], time.time(), self._hashes))
        finally:
            self._publisher.close()

    def _turn(self) -> None:
        is_waiting = not self._tell_changes()
        if self._publisher.replay_endpoint is None:
            self._closing.wait(_TURN_S if is_waiting else 0)
        else:
            self._is_asked |= self._publisher.answer(_TURN_S if is_waiting else 0)
        now = time.monotonic()
        if self._n_followed != len(self._followers):
            self._n_followed = len(self._followers)
            self._is_lost = True
        if self._is_lost or (self._is_asked and now >= self._next_retelling):
            self._tell_everything()
            self._is_asked = False
            self._next_retelling = now + _RETELL_S

    def _tell_changes(self) -> bool:
        """Tell one batch of changes; False if there was none."""
        keys, kinds, is_lost = self._changes.drain(_BATCH)
        # After the changes were taken: pages of a new epoch come behind its being told.
        self._is_lost |= is_lost or self._epoch() != self._told_epoch
        if self._is_lost or not len(keys):
            return self._is_lost
        self._send(list(_events(keys, kinds)))
        return True

    def _tell_everything(self) -> None:
        """Have subscribers forget all they know, then tell what is there.

        What changes meanwhile is in the log, and told behind the listing.
        """
        self._told_epoch = self._epoch()
        self._is_lost = False
        while len(self._changes.drain(LOG_CAPACITY)[0]):
            pass
        self._send([AllBlocksCleared()])
        self._n_retold += 1
        for medium, listed in self._listed():
            if self._closing.is_set():
                return
            self._send([messages.stored(_as_list(listed), medium)])

    def _listed(self) -> Iterator[tuple[str, Keys]]:
        cursor, is_first = 0, True
        while cursor or is_first:
            is_first = False
            keys, _, cursor = self._pool.list(cursor, _BATCH)
            if len(keys):
                yield messages.MEMORY, keys
        is_first = self._tier is not None
        while self._tier is not None and (cursor or is_first):
            is_first = False
            keys, cursor = self._tier.list(cursor, _BATCH)
            if len(keys):
                yield messages.DISK, keys

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        for follower in self._followers[: self._n_followed]:
            for event in events:
                if isinstance(event, AllBlocksCleared):
                    follower("AllBlocksCleared", "", ())
                else:
                    follower(type(event).__name__, event.medium or "", event.block_hashes)
        self._publisher.send(messages.encode(events, time.time(), self._hashes))
        self._n_told += 1

    def readings(self) -> dict[str, float]:
        """Return what the metrics show, by name."""
        return {
            "p2pkv_kv_event_batches_total": self._n_told,
            "p2pkv_kv_event_retellings_total": self._n_retold,
        }

    def close(self) -> None:
        """Tell that nothing is here any more, and stop; at most ``GOODBYE_S`` for what is on its way. Idempotent."""
        self._closing.set()
        if self._thread.ident is None:
            self._publisher.close()
        else:
            self._thread.join()


def _events(keys: Keys, kinds: NDArray[np.uint8]) -> Iterator[BlockStored | BlockRemoved]:
    """Yield an event for each run of changes of one kind: order between kinds is what says how it ended."""
    starts = np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1
    bounds = [0, *starts.tolist(), len(keys)]
    for first, end in pairwise(bounds):
        run, medium = _as_list(keys[first:end]), _MEDIA[kinds[first, 0]]
        yield messages.stored(run, medium) if kinds[first, 1] else BlockRemoved(run, medium)


def _as_list(keys: Keys) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]
