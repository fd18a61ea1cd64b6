"""An attached engine tells its host's node what its calls find often, for the node to bring that into its pool.

The sketch is that of any node's fetches (``native/src/cache/hot_pages.h``), and the node judges by the rule that holds
for its own calls (:mod:`p2pkv.cache.hot_guests`). A thread says it once a second, and what it says is answered by a
native thread of the node: no call waits for it, but where all requests that may be under way at once are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from p2pkv.attach.own_host import OwnHost
from p2pkv.limited_log import LimitedLog
from p2pkv.page import Keys
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TURN_S = 1.0
_MOST = 2048
"""Pages that the sketch may name: all of its two windows."""
_TELL_S = 0.05
"""What naming them may take; if it is more the node hears it a second later."""
_SKETCH_S = 20.0
"""What the sketch looks back at most. For so long after a bump it has ids that nobody asks for any more."""

FindsOf = Callable[[int], tuple[Keys, NDArray[np.uint64], NDArray[np.uint32]]]
"""As ``PageCache.finds``."""


class Finding(Resource):
    """Tells the node, from :meth:`start` to :meth:`close`; :meth:`turn` does so once."""

    def __init__(
        self,
        own_host: OwnHost,
        finds: FindsOf,
        epoch: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``epoch`` returns that of this engine's namespace."""
        self._own_host = own_host
        self._finds = finds
        self._epoch_now = epoch
        self._clock = clock
        self._log = LimitedLog(_log)
        self._epoch, self._blind_until = epoch(), 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-finding", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Tell it now, if there is a node that wants to hear it."""
        epoch = self._epoch_now()
        if epoch != self._epoch:
            self._epoch, self._blind_until = epoch, self._clock() + _SKETCH_S
        attachment = self._own_host.attachment
        if attachment is None or not attachment.takes_finds or self._clock() < self._blind_until:
            return
        keys, in_1000_s, n_looks = self._finds(_MOST)
        if len(keys):
            attachment.tell_finds(keys, in_1000_s, n_looks, _TELL_S)

    def close(self) -> None:
        """Tell no more; waits for the thread. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_TURN_S):
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(
                    type(error).__name__, "the host's node was not told what is hot", exc_info=error
                )
