"""What a node's hot guests are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from p2pkv import _native
from p2pkv.cache.hot_guests import HotGuests, Limits, Surroundings
from p2pkv.config import Config
from p2pkv.lifetime import weakly
from p2pkv.metrics import Metrics

if TYPE_CHECKING:
    from p2pkv.parts.cache import CacheParts


def start_hot_guests(
    parts: CacheParts,
    config: Config,
    epochs: _native.NamespaceEpochs,
    metrics: Metrics,
    *,
    undo: ExitStack,
) -> HotGuests | None:
    """Begin to bring pages here that calls fetch often from others; None where they are to have no room."""
    if not config.hot_share:
        return None
    room = int(config.hot_share * parts.pool.largest_page)
    hot_guests = make_hot_guests(parts, epochs, metrics, room, touch=bool(config.touch))
    undo.callback(hot_guests.close)
    hot_guests.start()
    return hot_guests


def make_hot_guests(
    parts: CacheParts,
    epochs: _native.NamespaceEpochs,
    metrics: Metrics,
    room: int,
    *,
    touch: bool,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> HotGuests:
    """Return what looks when it is told to, or from its start on; the caller keeps it for as long as ``parts``.

    ``touch``: owners hear of what is used here.
    """
    around = Surroundings(
        pool=parts.pool,
        tier=parts.tier,
        guests=parts.guests,
        prefetcher=parts.prefetcher,
        hot_pages=parts.cache.hot_pages,
        engine_finds=lambda rate, most: (
            [] if parts.attach_host is None else parts.attach_host.finds(rate, most)
        ),
        touch=parts.directory.touch if touch else None,
        members=parts.members,
        epoch=lambda: epochs.own,
        is_draining=lambda: parts.drainer.has_begun,
        metrics=metrics,
    )
    hot_guests = HotGuests(around, room, limits=limits, clock=clock)
    parts.pins.on_asked_for = parts.prefetcher.on_asked_for = weakly(hot_guests.asked_for)
    return hot_guests
