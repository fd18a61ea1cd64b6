"""Instances that the operator names: on the command line, or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from p2pkv_proxy.registry import Registry


def parse_instance(text: str, role: Role, mode: Mode) -> Instance:
    """Read ``URL[,KEY=VALUE...]``, the keys being fields of :class:`Instance`. Raises :class:`ConfigError`."""
    url, *rest = text.split(",")
    fields: dict[str, object] = {"url": url, "role": role.value, "mode": mode.value}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"an instance is URL[,KEY=VALUE...], not {text!r}")
        fields[name.strip()] = value
    return _instance(fields, strict=False)  # what is a number is the field's to say: an id may look like one


def read_file(path: Path) -> list[Instance]:
    """Read a JSON list of instances. Raises :class:`ConfigError`."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[dict[str, object]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read instances from {path}: {error}") from error
    instances = [_instance(entry) for entry in entries]
    if len({instance.id for instance in instances}) != len(instances):
        raise ConfigError(f"{path} names an instance twice")
    return instances


def _instance(fields: dict[str, object], *, strict: bool = True) -> Instance:
    try:
        return checked(msgspec.convert(fields, Instance, strict=strict))
    except msgspec.ValidationError as error:
        raise ConfigError(f"instance {fields.get('url')}: {error}") from error


def list_all(registry: Registry, before: Mapping[str, Instance], now: Mapping[str, Instance]) -> None:
    """Have the registry list the instances of ``now``, by id, where it has listed those of ``before``."""
    for gone in before.keys() - now.keys():
        registry.unlist(gone)
    for name, instance in now.items():
        if before.get(name) != instance:
            registry.list_instance(instance)
