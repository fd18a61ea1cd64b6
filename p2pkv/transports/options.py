"""Options of one transport: declared beside its class, checked where settings are made.

A transport declares a frozen dataclass derived from :class:`TransportOptions`, and names it as its ``Options``. Each
field has a default and is of type bool, int, float, str or ``tuple[str, ...]``; the setting ``transport_options`` sets
it, in a program, in JSON or as text. What the type can't say is checked in ``__post_init__``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, get_type_hints

from p2pkv.errors import ConfigError
from p2pkv.values import as_bool, as_number, as_tuple, is_unicode, nearest, shown

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

SETTING = "transport_options"

_FORMERLY = "formerly"

UNSET: Mapping[str, object] = MappingProxyType({})
"""No option is set: each has its default."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The options of a transport that has none, and what those of others derive from."""

    @classmethod
    def parse(cls, transport: str, values: Mapping[str, object]) -> Self:
        """Make the options of ``transport`` from what ``transport_options`` says of it.

        Raises :class:`~p2pkv.errors.ConfigError` for an option that is not there, with the nearest one, and for a value
        that it can't have, with what it should be.
        """
        kinds = get_type_hints(cls)
        options = {field.name: kinds[field.name] for field in dataclasses.fields(cls)}
        try:
            for name in values:
                if name not in options:
                    known = f"; it has {', '.join(options)}" if options else "; it has none"
                    raise ConfigError(f"unknown option {shown(name)}{nearest(str(name), options) or known}")
            return cls(**{name: _read(name, value, options[name]) for name, value in values.items()})
        except ConfigError as error:
            raise ConfigError(f"{SETTING} of {transport}: {error}") from error

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)!r}" for field in dataclasses.fields(self))


def former(default: T, setting: str) -> T:
    """Declare an option that used to be the setting ``setting`` of a node, which goes on setting it, with a warning."""
    value: T = dataclasses.field(default=default, metadata={_FORMERLY: setting})
    return value


def former_settings(options: type[TransportOptions]) -> dict[str, str]:
    """Return the settings that used to be for these options: their names to those of the options."""
    return {
        field.metadata[_FORMERLY]: field.name
        for field in dataclasses.fields(options)
        if _FORMERLY in field.metadata
    }


def _read(name: str, value: object, kind: type) -> object:
    if kind not in _READERS:
        raise TypeError(f"option {name} is declared as {kind}, which no setting can say")
    return _READERS[kind](name, value)


def _as_text(name: str, value: object) -> str:
    if isinstance(value, str) and "\0" not in value and is_unicode(value):
        return value
    raise ConfigError(f"{name} must be valid Unicode without zero bytes, not {shown(value)}")


_READERS: Mapping[object, Callable[[str, object], object]] = {
    bool: as_bool,
    int: lambda name, value: as_number(name, value, int),
    float: lambda name, value: as_number(name, value, float),
    str: _as_text,
    tuple[str, ...]: as_tuple,
}
