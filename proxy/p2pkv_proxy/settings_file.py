"""The file of settings: a JSON object with options that may change while the router runs, by their names.

What it says counts in place of the command line; what is taken out of it is as the command line says again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from p2pkv.errors import ConfigError
from p2pkv.message_types import worked_out
from p2pkv.values import check_choice, nearest, parse_size
from p2pkv_proxy.continuation import Resume
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.policies import POLICIES
from p2pkv_proxy.settings import Overrides, check_settings

_MOST_BYTES = 1 << 20
_MOST_TENANTS = 10_000
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 30)] | UnsetType
_CountOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 30)] | UnsetType
_Seconds: TypeAlias = Annotated[float, Meta(ge=0.1)] | UnsetType
_SecondsOrNone: TypeAlias = Annotated[float, Meta(ge=0.0)] | UnsetType


class Tenant(msgspec.Struct, forbid_unknown_fields=True):
    """What is said of an API key by its name."""

    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """While requests wait those of keys with a lower one go first; keys with the same one take turns."""


@worked_out
class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    policy: str | UnsetType = UNSET
    decode_policy: str | UnsetType = UNSET
    max_in_flight: _Count = UNSET
    queue_length: _CountOrNone = UNSET
    queue_timeout: _SecondsOrNone = UNSET
    max_body: str | int | UnsetType = UNSET
    attempts: Annotated[int, Meta(ge=1, le=10)] | UnsetType = UNSET
    resume: Resume | UnsetType = UNSET
    strict_pd: bool | UnsetType = UNSET
    pass_unknown: bool | UnsetType = UNSET
    answer_timeout: _Seconds = UNSET
    stalled_after: _Seconds = UNSET
    request_timeout: _Seconds = UNSET
    body_timeout: _Seconds = UNSET
    drain_timeout: _SecondsOrNone = UNSET
    direct_below: _CountOrNone = UNSET
    tenants: Annotated[dict[str, Tenant], Meta(max_length=_MOST_TENANTS)] | UnsetType = UNSET


RELOADABLE = frozenset(_Settings.__struct_fields__)
"""What a file of settings may say."""
AT_START = frozenset(
    {
        "listen",
        "prefill",
        "decode",
        "both",
        "mode",
        "heartbeats",
        "secret_file",
        "accepted_secret_file",
        "join",
        "ext_proc",
        "replica",
        "advertise",
        "access_log",
        "tracing",
        "workers",
        "lifetime",
        "log_format",
        "log_level",
    }
)
"""Options of the command line alone: what they name is there from the start to the end."""


def read_settings(path: Path, plan: Plan) -> Plan:
    """Return the plan with what the file says in place of options. Raises :class:`ConfigError`."""
    told = _parsed(path)
    said = {name: value for name in RELOADABLE if (value := getattr(told, name)) is not UNSET}
    policies = {name: said.pop(name, None) for name in ("policy", "decode_policy")}
    for name, policy in policies.items():
        if policy is not None:
            check_choice(f"{path}: {name}", policy, tuple(POLICIES))
    if "max_body" in said:
        said["max_body"] = parse_size(f"{path}: max_body", said["max_body"])
    if "tenants" in said:
        said["priorities"] = {name: tenant.priority for name, tenant in said.pop("tenants").items()}
    overrides = Overrides(
        settings=said, prefill_policy=policies["policy"], decode_policy=policies["decode_policy"]
    )
    changed = replace(plan, overrides=overrides)
    try:
        check_settings(changed.in_force)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return changed


def _parsed(path: Path) -> _Settings:
    try:
        raw = path.read_bytes()
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES} bytes, which are no settings")
        entries = msgspec.json.decode(raw, type=dict[str, object])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read settings from {path}: {error}") from error
    for name in entries:
        if name in AT_START:
            raise ConfigError(
                f"{path}: {name} can't change while the router runs; it is an option of the command line"
            )
        if name not in RELOADABLE:
            raise ConfigError(f"{path}: unknown setting {name[:60]!r}{nearest(name, sorted(RELOADABLE))}")
    try:
        return msgspec.convert(entries, _Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
