"""Instances that the operator names: on the command line, or in a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from p2pkv_proxy.registry import Registry

_log = logging.getLogger(__name__)
_LOOK_S = 1.0


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


async def follow_file(path: Path, known: Sequence[Instance], registry: Registry) -> None:
    """Bring the registry up to date whenever the file changes, for ever. A file that can't be read changes nothing."""
    listed = {instance.id for instance in known}
    stamp = file_stamp(path)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = file_stamp(path)
        if now == stamp:
            continue
        stamp = now
        try:
            instances = read_file(path)
        except ConfigError as error:
            _log.warning("%s; the instances stay as they are", error)
            continue
        for gone in listed - {instance.id for instance in instances}:
            registry.unlist(gone)
        for instance in instances:
            registry.list_instance(instance)
        listed = {instance.id for instance in instances}


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Return what is different when the file has changed."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
