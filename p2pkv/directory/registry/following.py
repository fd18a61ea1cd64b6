"""A registry on two threads: one follows a store, the other keeps this node's record in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from random import Random
from secrets import randbits
from typing import TypeVar

from p2pkv.directory.registry.follower import CALL_S, QUIET_S, Follower
from p2pkv.directory.registry.keeper import Keeper
from p2pkv.directory.registry.store import Listing, Outranks, Registry, Store
from p2pkv.errors import RegistryError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_ATTEMPT_S = 0.8
"""What one server may take to answer a node that starts, before another one is asked; doubled each time, since
perhaps all are slow."""
_AGAIN_S = 0.2
_AFTER_FAILURE_S = 1.0
"""After a fault of ours, so that it fills neither the log nor a core."""
_LEAVE_S = 0.4
"""What taking the record away may take; otherwise it ends by itself."""
_JOIN_S = 1.0
"""A look-up of a host name that hangs can't be broken off. Its thread ends with it, and touches nothing any more."""

T = TypeVar("T")


def counts(follower: Follower, keeper: Keeper) -> dict[str, int]:
    """Return what the two have counted, by the names of the metrics."""
    return {
        "p2pkv_registry_up": int(follower.is_up),
        "p2pkv_registry_lists_total": follower.n_lists,
        "p2pkv_registry_failures_total": follower.n_failures + keeper.n_failures,
        "p2pkv_registry_lost_records_total": keeper.n_lost,
    }


class FollowingRegistry(Registry):
    """The registry of a store, of which it opens two: a thread of its own for each.

    The threads ``p2pkv-registry-follow`` and ``p2pkv-registry-keep`` are started by :meth:`open` and joined by
    :meth:`close`.
    """

    def __init__(self, where: str, make_store: Callable[[], Store], ttl: float) -> None:
        random = Random(randbits(64))  # noqa: S311 - jitter, nothing secret
        self._where = where
        self._stores = (make_store(), make_store())
        self._on_change: Callable[[], None] = lambda: None
        self._follower = Follower(self._stores[0], where, time.monotonic, random, lambda: self._on_change())
        self._keeper = Keeper(self._stores[1], where, ttl, time.monotonic, random)
        self._n_failed_turns = 0
        self._limited = LimitedLog(_log)
        self._stopping = threading.Event()
        self._changed = threading.Event()  # what is wanted of the keeper
        self._threads: list[threading.Thread] = []

    @property
    def where(self) -> str:
        return self._where

    def open(self, name: str, outranks: Outranks, on_change: Callable[[], None], deadline_s: float) -> None:
        self._on_change = on_change
        self._keeper.open(name, outranks)
        try:
            self._insist(self._follower.read_all, deadline_s)
        finally:
            thread = threading.Thread(target=self._follow, name="p2pkv-registry-follow", daemon=True)
            thread.start()
            self._threads.append(thread)

    def listing(self) -> Listing:
        return self._follower.listing

    def claim(self, value: bytes, over: Collection[bytes], deadline_s: float) -> bytes | None:
        assert len(self._threads) == 1, "the record is claimed once, after open"
        in_the_way = self._insist(
            lambda timeout: self._keeper.claim(value, over, time.monotonic() + timeout), deadline_s
        )
        if in_the_way is None:
            self.publish(value)
        return in_the_way

    def publish(self, value: bytes | None) -> None:
        self._keeper.wanted = value
        self._changed.set()
        if len(self._threads) == 1 and not self._stopping.is_set():
            thread = threading.Thread(target=self._keep, name="p2pkv-registry-keep", daemon=True)
            thread.start()
            self._threads.append(thread)

    def counters(self) -> dict[str, int]:
        counted = counts(self._follower, self._keeper)
        counted["p2pkv_registry_failures_total"] += self._n_failed_turns
        return counted

    def close(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._changed.set()
        self._follower.is_closing = True
        self._stores[0].interrupt()
        until = time.monotonic() + _LEAVE_S
        for thread in reversed(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        if len(self._threads) < 2:  # claimed in vain, perhaps
            self._leave()
        self._stores[1].interrupt()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for store in self._stores:
            store.close()

    def _insist(self, call: Callable[[float], T], deadline_s: float) -> T:
        """Do a call, at one server after the other, until it is done or the time is over."""
        deadline, attempt = time.monotonic() + deadline_s, _ATTEMPT_S
        while True:
            try:
                return call(min(attempt, max(0.0, deadline - time.monotonic())))
            except RegistryError:
                attempt *= 2
                if time.monotonic() + _AGAIN_S >= deadline or self._stopping.wait(_AGAIN_S):
                    raise

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self._turn(lambda: self._follower.step(QUIET_S + 1.0)))

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            self._changed.wait(min(self._turn(self._keeper.step), threading.TIMEOUT_MAX))
        self._leave()

    def _turn(self, step: Callable[[], float]) -> float:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - the top of two threads' loops; it is logged
            self._n_failed_turns += 1
            self._limited.error("turn", "the registry failed; it goes on trying", exc_info=error)
            return _AFTER_FAILURE_S

    def _leave(self) -> None:
        with suppress(RegistryError):  # then its lease runs out
            self._keeper.leave(min(CALL_S, _LEAVE_S))
