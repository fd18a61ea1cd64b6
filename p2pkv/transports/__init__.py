"""The transports p2pkv knows, and the choice between them.

Built in are ``shm``, ``cuda_ipc``, ``verbs``, ``tcp``, ``ucx``, ``nccl`` and ``local``; a package adds its own with an
entry point of the group ``p2pkv.transports`` whose name is the transport's and whose value is the class.
``docs/transports.md`` tells how.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from p2pkv import plugins
from p2pkv.errors import ConfigError, TransportError
from p2pkv.transports.base import Remark, Transport, TransportSettings
from p2pkv.transports.cuda_ipc import CudaIpcTransport
from p2pkv.transports.local import LocalTransport
from p2pkv.transports.native import ShmTransport, TcpTransport
from p2pkv.transports.nccl import NcclTransport
from p2pkv.transports.options import SETTING, UNSET, TransportOptions, former_settings
from p2pkv.transports.ucx import UcxTransport
from p2pkv.transports.verbs import VerbsTransport
from p2pkv.values import nearest, shown

_log = logging.getLogger(__name__)

AllOptions = Mapping[str, Mapping[str, object]]
"""The setting ``transport_options``: by the name of a transport, the options that were set."""

_NONE_SET: AllOptions = {}

_ENCRYPT = "encrypt"
"""The option of transports that can encrypt what they carry."""

_CIPHER = "aes-256-gcm"
"""What the domain of a transport that encrypts ends with."""

_WITHIN_A_HOST = ("shm", "cuda_ipc", "local")
"""Transports of which nothing is on a network."""

AUTO = ("shm", "verbs", "tcp")
"""What ``transports: auto`` stands for, best first."""

BUILT_IN: Mapping[str, type[Transport]] = {
    transport.name: transport
    for transport in (
        ShmTransport,
        CudaIpcTransport,
        VerbsTransport,
        TcpTransport,
        UcxTransport,
        NcclTransport,
        LocalTransport,
    )
}


def names() -> list[str]:
    """Return the names of all transports, those that can't run here included."""
    return sorted({*BUILT_IN, *plugins.names(plugins.TRANSPORTS)})


def available(options: AllOptions = _NONE_SET) -> dict[str, str | None]:
    """Return for each transport None if it can run here, or one sentence saying what is missing."""
    return {name: _look_up(name, options)[1] for name in names()}


def transport_class(name: str, options: AllOptions = _NONE_SET) -> type[Transport]:
    """Return the class of a transport that can run here with these options.

    Raises :class:`~p2pkv.errors.ConfigError` for a name nobody has, :class:`~p2pkv.errors.TransportError`
    with what is missing for one that can't run on this machine.
    """
    check_name(name)
    transport, missing = _look_up(name, options)
    if transport is None or missing is not None:
        raise TransportError(f"transport '{name}' can't run here: {missing}")
    return transport


def _is_known(name: str) -> bool:
    # It takes longer than all else at the start of a node to look through what is installed.
    return name in BUILT_IN or name in names()


def check_name(name: str) -> None:
    """Raise ConfigError, with the nearest name, if no transport is called ``name``."""
    if not _is_known(name):
        known = names()
        nearest = difflib.get_close_matches(name, [*known, "auto"], n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are {', '.join(known)}"
        raise ConfigError(f"unknown transport {shown(name)}; {hint}")


def options_of(name: str, values: Mapping[str, object] = UNSET) -> TransportOptions:
    """Return the options of a transport with these values set.

    Raises :class:`~p2pkv.errors.ConfigError` for a transport that nobody has, or whose package can't be loaded, and for
    an option that it does not have or that can't be so.
    """
    check_name(name)
    transport, missing = _load(name)
    if transport is None:
        raise ConfigError(f"{SETTING} of {name} can't be checked: {missing}")
    return transport.options_class.parse(name, values)


def read_options(setting: object) -> dict[str, dict[str, object]]:
    """Return the setting ``transport_options``, a mapping of mappings or JSON of it, with values as they are declared.

    Raises :class:`~p2pkv.errors.ConfigError` as :func:`options_of`.
    """
    example = '{"tcp": {"streams": 4}}'
    if isinstance(setting, str):
        try:
            setting = json.loads(setting)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{SETTING} must be JSON such as {example}: {error}") from error
    if not isinstance(setting, Mapping) or not all(
        isinstance(values, Mapping) for values in setting.values()
    ):
        raise ConfigError(
            f"{SETTING} must have an object of options for each transport, as {example}, not {shown(setting)}"
        )
    read: dict[str, dict[str, object]] = {}
    for name, values in setting.items():
        if not _is_known(name):
            raise ConfigError(f"{SETTING}: unknown transport {shown(name)}{nearest(str(name), names())}")
        options = options_of(name, values)
        read[name] = {option: getattr(options, option) for option in values}
    return read


def encrypted(names: Sequence[str], options: AllOptions) -> dict[str, dict[str, object]]:
    """Return the options with ``encrypt`` set for the transports of these names: the setting ``encrypt``.

    Raises :class:`~p2pkv.errors.ConfigError` for a transport that nobody has, that can't encrypt, or whose options say
    that it shall not.
    """
    read = {name: dict(values) for name, values in options.items()}
    for name in names:
        try:
            check_name(name)
        except ConfigError as error:
            raise ConfigError(f"encrypt: {error}") from error
        if not _can_encrypt(name):
            able = [known for known in BUILT_IN if _can_encrypt(known)]
            raise ConfigError(f"encrypt: {name} can't encrypt what it carries; {', '.join(able)} can")
        if read.setdefault(name, {}).setdefault(_ENCRYPT, True) is not True:
            raise ConfigError(f"encrypt names {name}, but {SETTING} of {name} has encrypt false")
    return read


def _can_encrypt(name: str) -> bool:
    return _ENCRYPT in {field.name for field in dataclasses.fields(options_of(name))}


def unconfining(names: Sequence[str]) -> list[str]:
    """Return those of the names whose transports may let a peer reach memory that it was given no region of."""
    loaded = {name: _load(name)[0] for name in names}
    return [
        name for name, transport in loaded.items() if transport is not None and not transport.confines_peers
    ]


def encrypting(options: AllOptions) -> list[str]:
    """Return the names of the transports that these options have encrypt."""
    return [name for name, values in options.items() if values.get(_ENCRYPT) is True]


def former_names() -> dict[str, tuple[str, str]]:
    """Return the settings of old that are options now: their names to the transport's and the option's."""
    return {
        setting: (name, option)
        for name, transport in BUILT_IN.items()
        for setting, option in former_settings(transport.options_class).items()
    }


def take_former(values: Mapping[str, object]) -> dict[str, object]:
    """Return settings in which those of old have become options of their transports; each is warned of.

    Raises :class:`~p2pkv.errors.ConfigError` if one says something else than the option that it became.
    """
    kept = dict(values)
    moved = {setting: kept.pop(setting) for setting in former_names() if setting in kept}
    if not moved:
        return kept
    options = read_options(kept.get(SETTING, {}))
    for setting, value in moved.items():
        name, option = former_names()[setting]
        try:
            read = getattr(options_of(name, {option: value}), option)
        except ConfigError as error:
            raise ConfigError(f"{setting}, which is an option now: {error}") from error
        said = options.setdefault(name, {}).setdefault(option, read)
        if said != read:
            raise ConfigError(
                f"{setting} is {shown(read)}, but {SETTING} of {name} has {option} {shown(said)}"
            )
        _log.warning(
            "the setting %s has become an option: %s: %s",
            setting,
            SETTING,
            json.dumps({name: {option: read}}),
        )
    return kept | {SETTING: options}


def wanted(setting: str | Sequence[str], options: AllOptions = _NONE_SET) -> list[str]:
    """Return the names that the setting ``transports`` asks for, best first.

    ``auto`` leaves out what can't run here; names given one by one, and those that are to encrypt, must be able to.
    """
    if setting == "auto":
        # who asks for encryption must not go without the transport, as if the network were none
        for name in encrypting(options):
            transport_class(name, options)
        return [name for name in AUTO if _look_up(name, options)[1] is None]
    asked = [setting] if isinstance(setting, str) else list(setting)
    if not asked:
        raise ConfigError("transports is empty; leave it out, or name at least one")
    for name in asked:
        transport_class(name, options)
    return asked


def create(setting: str | Sequence[str], settings: TransportSettings) -> list[Transport]:
    """Start the transports that ``setting`` asks for, best first; all of them, or none is left running.

    With ``auto`` one that can't be started is left out, with a warning.
    """
    started: list[Transport] = []
    with ExitStack() as undo:
        for name in wanted(setting, settings.options):
            try:
                transport = transport_class(name, settings.options).create(settings)
            except TransportError as error:
                if setting != "auto":
                    raise
                _log.warning("transport %s is left out: %s", name, error)
                continue
            undo.callback(transport.close)
            started.append(transport)
        undo.pop_all()
    _tell_of_plain(started, settings.options)
    return started


def _tell_of_plain(started: Sequence[Transport], options: AllOptions) -> None:
    """Say which transports carry pages as they are, though others encrypt: ``auto`` may prefer them."""
    able = encrypting(options)
    for transport in started if able else ():
        if transport.name not in (*able, *_WITHIN_A_HOST):
            _log.warning(
                "transport %s carries pages to other hosts as they are, though %s encrypts: "
                "let the setting transports name only those that may",
                transport.name,
                ", ".join(able),
            )


def remarks(name: str, settings: TransportSettings) -> list[Remark]:
    """Return what a transport tells of this machine, whether it can run here or not; nothing if it can't be loaded."""
    transport, _ = _load(name)
    return [] if transport is None else list(transport.remarks(settings))


def connecting(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of the transports that connect two nodes: those of the same domain on both sides.

    ``ours`` and ``theirs`` map the names of each node's transports to their domains; the result is in the order of
    ``ours``, best first.
    """
    return [name for name, domain in ours.items() if theirs.get(name) == domain]


def unequal_encryption(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the transports that would connect two nodes if both encrypted them, or neither: name and both domains."""
    return [
        (name, domain, theirs[name])
        for name, domain in ours.items()
        if name in theirs and domain != theirs[name] and name in (domain, theirs[name])
    ]


def described(domains: Mapping[str, str]) -> str:
    """Return a node's transports, by name and domain, as people read them: with those said that encrypt."""
    return ", ".join(
        f"{name} (encrypted)" if domain == f"{name}:{_CIPHER}" else name for name, domain in domains.items()
    )


def _look_up(name: str, options: AllOptions) -> tuple[type[Transport] | None, str | None]:
    """Return the class, if it can be had, and what is missing for it to run with these options."""
    transport, missing = _load(name)
    if transport is None:
        return None, missing
    return transport, transport.unavailable(options.get(name, UNSET))


def _load(name: str) -> tuple[type[Transport] | None, str]:
    """Return the class, or why it can't be had."""
    if name in BUILT_IN:
        return BUILT_IN[name], ""
    try:
        return plugins.load(plugins.TRANSPORTS, name, Transport), ""  # type: ignore[type-abstract]
    except LookupError as error:
        return None, str(error)
