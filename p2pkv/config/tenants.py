"""Tenants of a node: namespaces with a secret of their own, each served by a node of its own within this one.

A tenant is a cluster of its own on the same hosts. So its settings are those of a node; what they leave out of how
bytes move is as for the node around it, and what a node has for itself (ports, disk, quotas) starts from nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from p2pkv.config.checks import AUTO
from p2pkv.config.sources import once_each
from p2pkv.errors import ConfigError
from p2pkv.transports import unconfining
from p2pkv.values import as_number, nearest, parse_size, shown

if TYPE_CHECKING:
    from p2pkv.config.settings import Config

MAX_TENANTS = 16
"""Each costs a node's threads, ports and descriptors."""
_MAX_NAME = 64
_DEFAULT_POOL_SIZE = "256MiB"
_EXAMPLE = '{"acme": {"secret_file": "/etc/p2pkv/acme", "pool_size": "8GiB"}}'
_OWN = (
    *("secret_file", "accepted_secret_files", "cluster", "listen", "attach_listen", "metrics_port"),
    "dashboard_token",
    *("pool_size", "disk_path", "disk_size", "buffer_size", "buddy_pool_size"),
)
"""Settings of a node that a tenant has for itself."""
_LIMITS = ("requests",)
_MOST_REQUESTS = 1 << 20

_FROM_NOTHING: Mapping[str, object] = {
    "tenants": {},
    "join": (),
    "must_join": False,
    "membership": "embedded",
    "accepted_secret_files": (),
    "pool_size": _DEFAULT_POOL_SIZE,
    "disk_path": None,
    "disk_size": 0,
    "buffer_size": 0,
    "buddy_pool_size": 0,
    "attach_listen": "",
    "metrics_port": None,
    "dashboard_token": "",
    "kv_events": "",
    "kv_events_replay": "",
    "indexer": "",
    "routers": (),
    "engine_url": "",
}
"""What a tenant's node does not have from the node around it."""

Tenants = Mapping[str, Mapping[str, object]]
"""The setting ``tenants``: by name, the settings of each."""


def read_tenants(setting: object) -> dict[str, dict[str, object]]:
    """Return the setting ``tenants``, a mapping of mappings or JSON of it. Names and fields are right then."""
    if isinstance(setting, str):
        try:
            setting = json.loads(setting, object_pairs_hook=once_each) if setting.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"tenants must be JSON such as {_EXAMPLE}: {error}") from error
    if not isinstance(setting, Mapping) or not all(isinstance(own, Mapping) for own in setting.values()):
        raise ConfigError(
            f"tenants must have an object of settings for each, as {_EXAMPLE}, not {shown(setting)}"
        )
    if len(setting) > MAX_TENANTS:
        raise ConfigError(
            f"tenants has {len(setting)}, and a node takes {MAX_TENANTS}; start further nodes for the rest"
        )
    return {_name(name): _fields(name, own) for name, own in setting.items()}


def _name(name: object) -> str:
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or " " in name
        or not 1 <= len(name.encode()) <= _MAX_NAME
    ):
        raise ConfigError(
            f"tenants: {shown(name)} can't be a tenant's name, which is the first word of its namespaces: 1 to "
            f"{_MAX_NAME} bytes that can be printed, without a space"
        )
    return name


def _fields(name: str, own: Mapping[object, object]) -> dict[str, object]:
    fields = (*_OWN, *_LIMITS)
    for field in own:
        if field not in fields:
            raise ConfigError(
                f"tenants: {name}: unknown setting {shown(field)}{nearest(str(field), fields)}; a tenant takes "
                f"{', '.join(fields)}"
            )
    read = {str(field): value for field, value in own.items()}
    if not read.get("secret_file"):
        raise ConfigError(
            f"tenants: {name}: secret_file is missing; a tenant is one by having a secret of its own, made by: "
            "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"
        )
    if parse_size(f"tenants: {name}: pool_size", read.get("pool_size", _DEFAULT_POOL_SIZE)) == 0:
        raise ConfigError(f"tenants: {name}: pool_size is 0; a tenant is there for its pool, so give it one")
    requests = as_number(f"tenants: {name}: requests", read.setdefault("requests", 0), int)
    if not 0 <= requests <= _MOST_REQUESTS:
        raise ConfigError(
            f"tenants: {name}: requests must be 0 (no limit) to {_MOST_REQUESTS}, not {requests}"
        )
    return read | {"requests": int(requests)}


def tenant_config(config: Config, name: str) -> Config:
    """Return the settings of a tenant's node within the node of ``config``. Raises ConfigError, which names it."""
    own = {field: value for field, value in config.tenants_by_name[name].items() if field in _OWN}
    host = config.listen.rpartition(":")[0]
    base = {**_FROM_NOTHING, "namespace": name, "cluster": _cluster(config, name), "listen": f"{host}:0"}
    try:
        # making it checks every value
        return dataclasses.replace(config, **{**base, **own})  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"tenants: {name}: {error}") from error


def _cluster(config: Config, name: str) -> str:
    """Return a name that all tenants' nodes of one cluster have, and those of another one do not."""
    digest = hashlib.blake2b(f"{config.cluster}\0{name}".encode(), digest_size=8, person=b"p2pkv-tenant-1")
    return f"tenant-{digest.hexdigest()}"


def check_tenants(config: Config) -> None:
    """Raise ConfigError for what tenants can't be beside each other, and beside the node around them."""
    if not config.tenants:
        return
    if config.attach:
        raise ConfigError(
            "attach is set, so tenants must not be: they are the business of the host's node. An engine of a tenant "
            "attaches to the attach_listen of that tenant there, and has the tenant's secret_file"
        )
    for name in unconfining([name for name in config.transport_names if name != "auto"]):
        raise ConfigError(
            f"tenants: transports names {name}, over which a peer may itself name addresses of this process, a "
            "tenant's pool among them, whichever cluster let it in; leave it out, or tenants"
        )
    word = config.namespace.split(" ")[0]
    if word in config.tenants:
        raise ConfigError(
            f"namespace is {shown(config.namespace)}, and {word!r} is one of tenants, whose pages this node's own "
            "calls would not find; give this node another namespace and call node.tenant(...), or, for an engine of "
            "that tenant alone, leave tenants out and set secret_file to the tenant's"
        )
    taken: dict[tuple[str, object], str] = {}
    folders: dict[str, str] = {}
    for whose, settings in [
        ("this node", config),
        *((name, tenant_config(config, name)) for name in config.tenants),
    ]:
        port = settings.listen.rpartition(":")[2]
        for field, value in (
            ("listen", settings.listen if port != "0" else None),
            ("metrics_port", settings.metrics_port or None),
            # that by itself is another one for each secret
            ("attach_listen", settings.attach_listen if settings.attach_listen not in ("", AUTO) else None),
            ("disk_path", settings.disk_path),
            ("cluster", settings.cluster),
        ):
            if value is not None and (other := taken.setdefault((field, value), whose)) != whose:
                raise ConfigError(
                    f"tenants: {whose}: {field} is {value!r}, which {other} has; give each its own"
                )
        if settings.disk_path is not None:
            _check_apart(whose, settings.disk_path, folders)


def _check_apart(whose: str, disk_path: str, folders: dict[str, str]) -> None:
    """Add a folder; ConfigError if it is one of ``folders`` or within one: each deletes what it finds in its own."""
    folder = os.path.realpath(disk_path)
    for other, of_whom in folders.items():
        if os.path.commonpath((folder, other)) in (folder, other):
            raise ConfigError(
                f"tenants: {whose}: disk_path is {disk_path!r}, and that of {of_whom} is {other!r}: neither may be "
                "the other or lie within it, since each node deletes what it finds in its folder; give each its own"
            )
    folders[folder] = whose
