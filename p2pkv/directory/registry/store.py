"""What a store of records can do, and what a registry makes of it.

A **store** is one kind of service (etcd), spoken to by one thread in calls with deadlines. Entries have a **name** (the
node's id), a **value** (its sealed record) and a **version** that grows with each change anywhere in the store.

A **registry** is what a membership engine sees of it: the entries as they were last known, and a place for the node's
own record. Nothing of it waits but :meth:`Registry.open`, :meth:`Registry.claim` and :meth:`Registry.close`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from p2pkv.errors import RegistryError


class GapError(RegistryError):
    """What changed since is not known any more: list everything."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, and the version that it was written with."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Contents:
    """All entries at one version of the store."""

    entries: Mapping[str, Entry]
    version: int


@dataclass(frozen=True, slots=True)
class Change:
    """An entry was written; or, without a value, is gone."""

    name: str
    value: bytes | None
    version: int


class Store(ABC):
    """One thread's way to a store; every call raises :class:`RegistryError` when it can't be done in time."""

    @property
    @abstractmethod
    def server(self) -> str:
        """The server that is asked now, as messages name it."""

    @abstractmethod
    def read_all(self, timeout: float) -> Contents:
        """Return everything, as the majority of the store's servers has it now."""

    @abstractmethod
    def watch(self, since: int, timeout: float) -> None:
        """Follow the changes after version ``since`` with :meth:`changes` from now on."""

    @abstractmethod
    def changes(self, timeout: float) -> list[Change] | None:
        """Wait for what changes next, perhaps nothing that matters; None if nothing was heard for ``timeout`` seconds.

        Raises :class:`GapError` if the store has forgotten what came after ``since``.
        """

    @abstractmethod
    def put(self, name: str, value: bytes, expected: int, timeout: float) -> Entry | int:
        """Write an entry if its version is still ``expected`` (0: there is none), and keep it while it is renewed.

        Return the new version, or else the entry that is in the way.
        """

    @abstractmethod
    def renew(self, name: str, version: int, timeout: float) -> int | None:
        """Keep an entry that was put for another while; return its version, or None if it is gone or not ours."""

    @abstractmethod
    def remove(self, name: str, timeout: float) -> None:
        """Take away an entry that was put here, if it is still ours. After an error it may be tried again."""

    @abstractmethod
    def leave_server(self) -> None:
        """Ask another server from the next call on, if there is one: this one does not answer as it should."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the call under way, and every later one, with an error. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. By the thread that calls, or once it has ended."""


P = ParamSpec("P")
S = TypeVar("S", bound=Store)
T = TypeVar("T")


def understood(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have a method that takes answers apart raise RegistryError for one that is not what it should be.

    Whoever gave it may be another service, while the store's other servers are what they should be.
    """

    @functools.wraps(method)
    def call(store: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            return method(store, *arguments, **options)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            failure = RegistryError(f"{store.server} answers what it should not: {error!r}"[:500])
            store.leave_server()
            raise failure from error

    return call


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries as they were last known; the same object until one changes."""

    values: Mapping[str, bytes]
    is_current: bool = False
    """Whether the store answers, so that changes are learnt when they happen."""


Outranks = Callable[[bytes, bytes], bool]
"""``(ours, theirs)``: whether our value may take the place of the one that another process wrote under our name."""


class Registry(ABC):
    """A node's part in a store. Made, opened and closed by the engine; :meth:`listing` from any thread."""

    @property
    @abstractmethod
    def where(self) -> str:
        """What messages call the store."""

    @abstractmethod
    def open(self, name: str, outranks: Outranks, on_change: Callable[[], None], deadline_s: float) -> None:
        """Read everything, and follow it from then on; ``on_change`` is called, from another thread, when it changes.

        Raises :class:`RegistryError` if that can't be done in time; it is tried again until :meth:`close` all the same.
        """

    @abstractmethod
    def listing(self) -> Listing:
        """Return what is known; the last known while the store is away. Never blocks."""

    @abstractmethod
    def claim(self, value: bytes, over: Collection[bytes], deadline_s: float) -> bytes | None:
        """Write ``value`` under this node's name, if nothing is there or one of ``over``; then go on as published.

        Return None, or the value that is in the way. Raises :class:`RegistryError`.
        """

    @abstractmethod
    def publish(self, value: bytes | None) -> None:
        """Have ``value`` under this node's name from now on, as soon as the store can be reached; None: nothing."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return what happened so far, by the names of the metrics."""

    @abstractmethod
    def close(self) -> None:
        """Take this node's record away, within half a second or else leave it to its end, and stop. Idempotent."""
