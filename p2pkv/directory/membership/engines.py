"""The membership engines p2pkv knows: its own, and those of installed packages (:mod:`p2pkv.plugins`)."""

from __future__ import annotations

from collections.abc import Mapping

from p2pkv import plugins
from p2pkv.directory.membership.base import Membership
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.errors import ConfigError

_BUILT_IN: Mapping[str, type[Membership]] = {"embedded": EmbeddedMembership, "static": StaticMembership}


def engine_class(name: str) -> type[Membership]:
    """Return the engine that the setting ``membership`` names. Raises ConfigError if it can't be had."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    try:
        return plugins.load(plugins.MEMBERSHIP, name, Membership)  # type: ignore[type-abstract]
    except LookupError as error:
        raise ConfigError(f"membership {name!r} can't be had: {error}") from error
