"""The membership engines p2pkv knows: its own, with a store or without, and those of installed packages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from p2pkv import plugins
from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.membership.base import Membership
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.registered import RegisteredMembership
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.directory.registry.following import FollowingRegistry
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.registry.stores import make_store
from p2pkv.errors import ConfigError
from p2pkv.store_url import StoreUrl, is_store_url, read_store_url

_BUILT_IN: Mapping[str, type[Membership]] = {"embedded": EmbeddedMembership, "static": StaticMembership}


def engine_class(name: str) -> type[Membership]:
    """Return the engine that the setting ``membership`` names. Raises ConfigError if it can't be had."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    try:
        return plugins.load(plugins.MEMBERSHIP, name, Membership)  # type: ignore[type-abstract]
    except LookupError as error:
        raise ConfigError(f"membership {name!r} can't be had: {error}") from error


def make_engine(membership: str, keys: ClusterKeys, cluster: str) -> Callable[..., Membership]:
    """Return what an engine is made by, as :class:`Membership` says. Raises ConfigError if it can't be had."""
    if not is_store_url(membership):
        return engine_class(membership)
    url = read_store_url(membership)
    return functools.partial(
        RegisteredMembership, registry=make_registry(url, cluster), seal=Seal(keys, cluster)
    )


def make_registry(url: StoreUrl, cluster: str) -> FollowingRegistry:
    """Return the registry of a store; it connects when it is opened."""
    return FollowingRegistry(url.where, lambda: make_store(url, cluster), url.ttl)
