"""Which routers there are: each tells all nodes where it takes heartbeats, and engines' hearts follow.

A router is no member of the cluster. It sends members news (GOSSIP, ``docs/membership.md``) that have no member in
them, but the router itself. A node forgets it when it has not said so again for as long as it said. An engine that is
attached to its host's node asks that one, with which it shares a clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import msgspec

from p2pkv.address import split_address
from p2pkv.directory.view import VIEW_VERSION
from p2pkv.errors import ConfigError, ControlError

MOST_ROUTERS = 64
"""Routers that a node knows, and an engine tells; further ones are left out."""
SENDER = "p2pkv-proxy"
"""What a router calls itself to nodes: it has no node id."""
_MOST_LASTS_S = 600.0
_MOST_ADDRESS = 260
_MAX_NEWS = 1024
"""Bytes: what is longer is no router's news, and not looked at."""


class RouterNews(msgspec.Struct, frozen=True):
    """A router says that it is there."""

    address: str
    """``HOST:PORT`` where it takes heartbeats."""
    lasts_ms: int
    """For so long this is so, unless it says so again."""


class _News(msgspec.Struct):
    router: RouterNews | None = None


class _Told(msgspec.Struct):
    """A view without members: what nodes that know of no routers read."""

    router: RouterNews
    version: int = VIEW_VERSION
    sender: str = SENDER
    members: tuple[()] = ()


_decoder = msgspec.msgpack.Decoder(_News)
_all_decoder = msgspec.msgpack.Decoder(list[tuple[str, float]])


def pack_news(address: str, lasts: float) -> bytes:
    """Return the body of a GOSSIP by which a router says that it takes heartbeats at ``address``."""
    return msgspec.msgpack.encode(_Told(RouterNews(address, round(lasts * 1000))))


class KnownRouters:
    """The routers that have told this node of themselves. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()  # guards all below
        self._until: dict[str, float] = {}

    def take(self, blob: bytes) -> bool:
        """Take what a peer has handed to this node, if it is a router's news; whether it was."""
        if len(blob) > _MAX_NEWS:
            return False
        try:
            news = _decoder.decode(blob).router
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False  # whoever reads it as a view says so
        if news is None:
            return False
        self._note(news.address, self._now() + news.lasts_ms / 1000)
        return True

    def pack(self) -> bytes:
        """Return all that are known, for :meth:`take_all` in another process of this host."""
        with self._lock:
            return msgspec.msgpack.encode(list(self._until.items()))

    def take_all(self, blob: bytes) -> None:
        """Take what another process of this host knows; raises :class:`~p2pkv.errors.ControlError` for nonsense."""
        try:
            known = _all_decoder.decode(blob)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ControlError(f"routers that can't be read: {error}") from error
        for address, until in known[:MOST_ROUTERS]:
            self._note(address, until)

    def _note(self, address: str, until: float) -> None:
        now = self._now()
        if not now < until < math.inf or not _is_fit(address):
            return
        with self._lock:
            self._until = {address: until for address, until in self._until.items() if until > now}
            if address in self._until or len(self._until) < MOST_ROUTERS:
                self._until[address] = min(until, now + _MOST_LASTS_S)

    def addresses(self) -> tuple[str, ...]:
        """Return where those take heartbeats that are there now."""
        now = self._now()
        with self._lock:
            return tuple(address for address, until in self._until.items() if until > now)


def _is_fit(address: str) -> bool:
    try:
        return len(address) <= _MOST_ADDRESS and split_address("router", address)[1] > 0
    except ConfigError:
        return False
