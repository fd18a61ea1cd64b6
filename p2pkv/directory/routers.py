"""Which routers there are: each tells all nodes where it takes heartbeats, and engines' hearts follow.

A router is no member of the cluster. It sends members news (GOSSIP, ``docs/membership.md``) that have no member in
them, but the router itself. A node forgets it when it has not said so again for as long as it said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from p2pkv.address import split_address
from p2pkv.directory.view import VIEW_VERSION
from p2pkv.errors import ConfigError

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
        try:
            is_fit = len(news.address) <= _MOST_ADDRESS and split_address("router", news.address)[1] > 0
        except ConfigError:
            is_fit = False
        if is_fit and news.lasts_ms > 0:
            self._note(news)
        return True

    def _note(self, news: RouterNews) -> None:
        now = self._now()
        with self._lock:
            self._until = {address: until for address, until in self._until.items() if until > now}
            if news.address in self._until or len(self._until) < MOST_ROUTERS:
                self._until[news.address] = now + min(news.lasts_ms / 1000, _MOST_LASTS_S)

    def addresses(self) -> tuple[str, ...]:
        """Return where those take heartbeats that are there now."""
        now = self._now()
        with self._lock:
            return tuple(address for address, until in self._until.items() if until > now)
