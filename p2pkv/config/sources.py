"""Where settings come from: a JSON file, a host engine's own configuration, the environment."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Mapping

from p2pkv.errors import ConfigError
from p2pkv.values import nearest, shown

_log = logging.getLogger(__name__)

_SERVICE = re.compile(
    r"P2PKV_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables by which Kubernetes tells each pod of the Services of its namespace whose names begin with ``p2pkv``."""
_SERVICES = ("tcp://", "udp://", "sctp://")
"""How ``P2PKV_METRICS_PORT`` begins where there is a Service ``p2pkv-metrics``."""


def gather(
    names: Collection[str],
    settings: Mapping[str, object] | str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    host_keys: Collection[str],
) -> dict[str, object]:
    """Return what was given of the settings called ``names``; ``settings`` wins over ``P2PKV_*`` variables.

    ``host_keys`` are the host engine's own keys in ``settings``: they are let through. Raises
    :class:`~p2pkv.errors.ConfigError` for unknown keys, naming the nearest one; of unknown variables it warns.
    """
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith("P2PKV_"):
            continue
        key = variable.removeprefix("P2PKV_").lower()
        if key in names and not text.startswith(_SERVICES):
            values[key] = text
        elif not (_SERVICE.fullmatch(variable) or key.startswith("test_")):
            _log.warning("environment variable %s is no setting of p2pkv%s", variable, nearest(key, names))
    given = settings if isinstance(settings, Mapping) else read_settings(settings)
    for key, value in given.items():
        if key in host_keys:
            continue
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, names)}")
        values[key] = value
    return values


def once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the object of JSON, for ``object_pairs_hook``: ValueError where a name is there twice.

    Of the two the last would count, without a word.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is there twice; leave one out")
    return found


def read_settings(path: str | os.PathLike[str] | None) -> Mapping[str, object]:
    """Return the settings in a JSON file; none without a path. Keys and values are not checked yet."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file, object_pairs_hook=once_each)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read settings from {os.fspath(path)}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{os.fspath(path)} must hold a JSON object, not {type(settings).__name__}")
    return settings
