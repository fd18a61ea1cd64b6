"""The transports p2pkv knows, and the choice between them.

Built in are ``shm``, ``verbs``, ``tcp``, ``ucx`` and ``local``; a package adds its own with an entry point of the group
``p2pkv.transports`` whose name is the transport's and whose value is the class. ``docs/transports.md`` tells
how.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.local import LocalTransport
from p2pkv.transports.native import ShmTransport, TcpTransport
from p2pkv.transports.ucx import UcxTransport
from p2pkv.transports.verbs import VerbsTransport

_log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "p2pkv.transports"

AUTO = ("shm", "verbs", "tcp")
"""What ``transports: auto`` stands for, best first."""

_BUILT_IN: Mapping[str, type[Transport]] = {
    transport.name: transport
    for transport in (ShmTransport, VerbsTransport, TcpTransport, UcxTransport, LocalTransport)
}


def names() -> list[str]:
    """Return the names of all transports, those that can't run here included."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def available() -> dict[str, str | None]:
    """Return for each transport None if it can run here, or one sentence saying what is missing."""
    return {name: _look_up(name)[1] for name in names()}


def transport_class(name: str) -> type[Transport]:
    """Return the class of a transport that can run here.

    Raises :class:`~p2pkv.errors.ConfigError` for a name nobody has, :class:`~p2pkv.errors.TransportError`
    with what is missing for one that can't run on this machine.
    """
    check_name(name)
    transport, missing = _look_up(name)
    if transport is None or missing is not None:
        raise TransportError(f"transport '{name}' can't run here: {missing}")
    return transport


def check_name(name: str) -> None:
    """Raise ConfigError, with the nearest name, if no transport is called ``name``."""
    known = names()
    if name not in known:
        nearest = difflib.get_close_matches(name, [*known, "auto"], n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are {', '.join(known)}"
        raise ConfigError(f"unknown transport '{name}'; {hint}")


def wanted(setting: str | Sequence[str]) -> list[str]:
    """Return the names that the setting ``transports`` asks for, best first.

    ``auto`` leaves out what can't run here; names given one by one must all be able to.
    """
    if setting == "auto":
        return [name for name in AUTO if _look_up(name)[1] is None]
    asked = [setting] if isinstance(setting, str) else list(setting)
    if not asked:
        raise ConfigError("transports is empty; leave it out, or name at least one")
    for name in asked:
        transport_class(name)
    return asked


def create(setting: str | Sequence[str], settings: TransportSettings) -> list[Transport]:
    """Start the transports that ``setting`` asks for, best first; all of them, or none is left running.

    With ``auto`` one that can't be started is left out, with a warning.
    """
    started: list[Transport] = []
    try:
        for name in wanted(setting):
            try:
                started.append(transport_class(name).create(settings))
            except TransportError as error:
                if setting != "auto":
                    raise
                _log.warning("transport %s is left out: %s", name, error)
    except BaseException:
        for transport in started:
            transport.close()
        raise
    return started


def connecting(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of the transports that connect two nodes: those of the same domain on both sides.

    ``ours`` and ``theirs`` map the names of each node's transports to their domains; the result is in the order of
    ``ours``, best first.
    """
    return [name for name, domain in ours.items() if theirs.get(name) == domain]


def _look_up(name: str) -> tuple[type[Transport] | None, str | None]:
    """Return the class, if it can be had, and what is missing for it to run."""
    if name in _BUILT_IN:
        return _BUILT_IN[name], _BUILT_IN[name].unavailable()
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            transport = point.load()
        except (ImportError, AttributeError) as error:
            return None, f"its package can't be loaded: {error}"
        if not (isinstance(transport, type) and issubclass(transport, Transport)):
            return None, f"{point.value} is not a p2pkv.transports.base.Transport"
        return transport, transport.unavailable()
    return None, "no package provides it"
