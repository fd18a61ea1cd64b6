"""What other packages add to p2pkv: transports and membership engines, each found by an entry point.

A package names its class in its ``pyproject.toml``, and p2pkv knows it by that name once the package is installed::

    [project.entry-points."p2pkv.membership"]
    consul = "p2pkv_consul:ConsulMembership"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

MEMBERSHIP = "p2pkv.membership"
"""The group of membership engines, subclasses of :class:`p2pkv.membership.Membership`."""

TRANSPORTS = "p2pkv.transports"
"""The group of transports, subclasses of :class:`p2pkv.transports.base.Transport`."""

T = TypeVar("T")


def names(group: str) -> list[str]:
    """Return the names that installed packages add to ``group``, sorted. Imports none of them."""
    return sorted({point.name for point in _entry_points(group)})


def load(group: str, name: str, base: type[T]) -> type[T]:
    """Import the class that a package added to ``group`` as ``name``.

    Raises ``LookupError``, with one sentence that says why, if there is none, if it can't be imported, or if it is no
    subclass of ``base``.
    """
    for point in _entry_points(group).select(name=name):
        try:
            found = point.load()
        except (ImportError, AttributeError) as error:
            raise LookupError(f"its package can't be loaded: {error}") from error
        if not (isinstance(found, type) and issubclass(found, base)):
            raise LookupError(f"{point.value} is not a {base.__module__}.{base.__qualname__}")
        return found
    raise LookupError("no package provides it")


def _entry_points(group: str) -> EntryPoints:
    # imported here: it takes longer than most of what p2pkv imports, and few look for plugins
    from importlib.metadata import entry_points

    return entry_points(group=group)
