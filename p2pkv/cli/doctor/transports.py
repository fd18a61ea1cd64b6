"""The transports: which can run here, over what, and whether they bring the right bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from p2pkv import transports
from p2pkv.address import split_address
from p2pkv.cli.doctor.finding import Finding, Verdict, limit, size
from p2pkv.cli.doctor.selftest import read_from_itself
from p2pkv.config import Config
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.transports.base import TransportSettings
from p2pkv.transports.locked_memory import locked_memory_limit

_WILDCARDS = ("0.0.0.0", "::", "*")


def examine_transports(config: Config) -> Iterator[Finding]:
    """Say of each transport what is missing, or try it out."""
    settings = _settings(config)
    wanted = _wanted(config)
    for name, missing in transports.available(config.options).items():
        if missing is not None:
            yield Finding(Verdict.NOTE, f"transport {name}", missing)
        else:
            yield _try_out(name, settings, is_wanted=name in wanted)
    yield from _options(config)
    for name in transports.names():
        for remark in transports.remarks(name, settings):
            verdict = Verdict.NOTE if remark.advice else Verdict.GOOD
            yield Finding(verdict, remark.what, remark.says, remark.advice)
    yield _locked_memory(config)
    yield from _chosen(config)


def _settings(config: Config) -> TransportSettings:
    host, _ = split_address("listen", config.listen)
    host = "127.0.0.1" if host in _WILDCARDS else host
    return TransportSettings(host=host, advertise=host, options=config.options)


def _options(config: Config) -> Iterator[Finding]:
    """Say which options are in force, of every transport that has any."""
    for name in transports.names():
        try:
            in_force = str(transports.options_of(name, config.options.get(name, {})))
        except ConfigError:
            continue  # its package can't be loaded, which was said of it already
        if in_force:
            yield Finding(Verdict.GOOD, f"options of {name}", in_force)


def _try_out(name: str, settings: TransportSettings, *, is_wanted: bool) -> Finding:
    what = f"transport {name}"
    try:
        (transport,) = transports.create([name], settings)
    except P2PKVError as error:
        if is_wanted and settings.options.get(name):
            advice = "change its 'transport_options', unless a node that runs here has what they ask for"
            return Finding(Verdict.BAD, what, str(error), advice)
        return Finding(Verdict.NOTE, what, str(error))
    try:
        if (why := transport.untried(settings)) is not None:
            return Finding(Verdict.NOTE, what, f"it starts; {why}")
        return Finding(Verdict.GOOD, what, read_from_itself(transport))
    except P2PKVError as error:
        return Finding(Verdict.BAD, what, str(error), f"leave {name} out of 'transports'")
    finally:
        transport.close()


def _chosen(config: Config) -> Iterator[Finding]:
    try:
        chosen = transports.wanted(_setting(config), config.options)
    except P2PKVError as error:
        yield Finding(Verdict.BAD, "transports", str(error), "change the setting 'transports'")
        return
    if chosen:
        yield Finding(Verdict.GOOD, "transports", f"a node uses {', then '.join(chosen)}")
    else:
        yield Finding(Verdict.BAD, "transports", "none can run here", "see the lines above")


def _locked_memory(config: Config) -> Finding:
    """Say how much this process may lock, and whether that is enough for transports that lock what is registered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    says = f"{limit(soft, ' bytes')} (hard {limit(hard, ' bytes')})"
    lockable = locked_memory_limit()
    is_enough = lockable is None or lockable >= config.registered_nbytes
    if lockable is None and soft != resource.RLIM_INFINITY:
        says += ", but this process may lock any amount (CAP_IPC_LOCK)"
    locking = [
        name for name in _wanted(config) if transports.transport_class(name, config.options).locks_memory
    ]
    if not locking:
        return Finding(Verdict.GOOD, "locked memory", f"{says}; no transport that a node uses locks any")
    names = " and ".join(locking)
    if is_enough:
        return Finding(Verdict.GOOD, "locked memory", f"{says}; only {names} locks any")
    return Finding(
        Verdict.BAD,
        "locked memory",
        f"{says}; {names} locks the pool and the receive buffer, {size(config.registered_nbytes)} on every rail, "
        "and all registered memory",
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), lower pool_size and buffer_size, or leave "
        f"{names} out of transports",
    )


def _setting(config: Config) -> str | tuple[str, ...]:
    return "auto" if config.transport_names == ("auto",) else config.transport_names


def _wanted(config: Config) -> list[str]:
    try:
        return transports.wanted(_setting(config), config.options)
    except P2PKVError:
        return []  # said of the setting
