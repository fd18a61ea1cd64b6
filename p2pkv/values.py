"""What the values of settings become, wherever they come from: a program, JSON, or the text of a variable.

Each function that may refuse a value takes the name of its setting, for the :class:`~p2pkv.errors.ConfigError` that
it raises then.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection
from fractions import Fraction

from p2pkv.errors import ConfigError

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS[_letter + "i"] = _SIZE_UNITS[_letter + "ib"] = 1024**_power  # "Gi" is Kubernetes'
    _SIZE_UNITS[_letter + "b"] = 1000**_power


def parse_size(name: str, value: object) -> int:
    """Return ``value`` in bytes; accepts an int or a text such as ``64MiB``, ``1Gi``, ``1.5GB`` or ``4096``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*", value)
        if match is not None and match[2].lower() in _SIZE_UNITS:
            return int(Fraction(match[1]) * _SIZE_UNITS[match[2].lower()])
        if match is not None and len(match[2]) == 1 and match[2].lower() in "kmgt":
            unit = match[2].upper()
            raise ConfigError(
                f"{name} is {shown(value)}, which is {match[1]}{unit}B to Kubernetes and {match[1]}{unit}iB to Docker; "
                "write which one"
            )
    raise ConfigError(f"{name} must be a size such as 67108864 or '64MiB', not {shown(value)}")


def as_ports(name: str, value: object) -> tuple[int, int]:
    """Return ``value``, the text of a port or of a range such as ``7500-7599``, as first and last; empty is 0 to 0."""
    if value == "":
        return 0, 0
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", str(value))
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if 1 <= first <= last <= 65535:
            return first, last
    raise ConfigError(f"{name} must be a port or a range of them such as 7500-7599, not {shown(value)}")


def as_folder(path: str) -> str:
    """Return the path of a folder such that a suffix makes a name beside the folder, and not within it."""
    plain = path.rstrip("/")
    return os.path.realpath(path) if os.path.basename(plain) in ("", ".", "..") else plain


def as_tuple(name: str, value: object) -> tuple[str, ...]:
    """Return ``value``, a list of strings or a comma-separated one, as a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (tuple, list)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ConfigError(f"{name} must be a list of strings or a comma-separated string, not {value!r}")


def as_number(name: str, value: object, kind: type[int | float]) -> int | float:
    """Return ``value``, a number or the text of one, as ``kind``; it is finite."""
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = kind(value)
            if math.isfinite(number) and (isinstance(value, str) or number == value):
                return number
        except (ValueError, OverflowError):
            pass  # said below, with the name of the setting
    what = "a whole number" if kind is int else "a number"
    raise ConfigError(f"{name} must be {what}, not {shown(value)}")


def as_bool(name: str, value: object) -> bool:
    """Return ``value``, or what the text of one says."""
    if isinstance(value, bool):
        return value
    choices = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str) and value.lower() in choices:
        return choices[value.lower()]
    raise ConfigError(f"{name} must be true or false, not {shown(value)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, with the nearest one, if ``value`` is none of ``choices``."""
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(choices)}; not {shown(value)}{nearest(value, choices)}"
        )


def is_unicode(text: str) -> bool:
    """Return whether ``text`` can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Return a value as it stands in messages: whatever a file or variable held, they stay short."""
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def nearest(value: str, choices: Collection[str]) -> str:
    """Return the end of a message about an unknown word: the nearest known one, if any is near."""
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
