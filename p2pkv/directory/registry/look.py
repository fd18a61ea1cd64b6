"""Looking into a store without being a member: for the commands, which ask once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.registry.stores import make_store
from p2pkv.directory.view import Member
from p2pkv.errors import RegistryError, VersionError, ViewError
from p2pkv.store_url import StoreUrl

T = TypeVar("T")

_NO_VERSION = 2**62
"""No entry ever has this version, so that a write that expects it changes nothing."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The records of a cluster."""

    members: tuple[Member, ...]
    refused: Mapping[str, str]
    """Why some can't be used, by their names."""


def look(url: StoreUrl, keys: ClusterKeys, cluster: str, timeout: float) -> Sight:
    """Return what the store has of a cluster. Raises :class:`~p2pkv.errors.RegistryError`."""
    store, seal = make_store(url, cluster), Seal(keys, cluster)
    try:
        contents = _with_any(url, store.read_all, timeout)
    finally:
        store.close()
    members, refused = [], {}
    for name, entry in contents.entries.items():
        try:
            members.append(seal.open(entry.value))
        except (ViewError, VersionError) as error:
            refused[name] = str(error)
    return Sight(tuple(members), refused)


def _with_any(url: StoreUrl, call: Callable[[float], T], timeout: float) -> T:
    """Do a call at the first server that can; each has its share of the time."""
    failure: RegistryError | None = None
    for _ in url.endpoints:
        try:
            return call(timeout / len(url.endpoints))
        except RegistryError as error:
            failure = error
    assert failure is not None, "a store has servers"
    raise failure


def try_to_write(url: StoreUrl, cluster: str, node_id: str, timeout: float) -> None:
    """Find out, without changing anything, whether a node may keep its record there. Raises RegistryError if not."""
    store = make_store(url, cluster)
    try:
        _with_any(url, lambda share: store.put(node_id, b"", _NO_VERSION, share), timeout)
        store.remove(node_id, timeout)
    finally:
        store.close()
