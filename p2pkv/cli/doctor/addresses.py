"""The addresses that a node listens at: each is bound for a moment, as the node would."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from p2pkv.address import is_loopback, reachable_host, require_public, split_address
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.config import DATA_PORTS, Config
from p2pkv.control.host_names import Names
from p2pkv.errors import ConfigError
from p2pkv.kv_events.publisher import EventPublisher

_NAMES_S = 2.0


def examine_addresses(config: Config) -> Iterator[Finding]:
    """Look at ``listen``, and at those of the others that are set."""
    yield _listen(config, "listen", config.outward_addresses)
    if config.data_ports:
        yield _data_ports(config)
    if config.metrics_port:
        yield _metrics(config, "metrics")
    if config.kv_events:
        yield _kv_events(config)
    if config.indexer:
        yield _indexer(config)


def examine_tenants_addresses(config: Config, name: str, outward: Sequence[str]) -> Iterator[Finding]:
    """Look at those that are set for a tenant; its data ports are counted with those of the node around it.

    ``outward`` is the way to peers of that node, since the tenant's joins nobody by an address.
    """
    if split_address("listen", config.listen)[1]:
        yield _listen(config, f"listen of {name}", outward)
    if config.metrics_port:
        yield _metrics(config, f"metrics of {name}")


def _listen(config: Config, what: str, outward: Sequence[str]) -> Finding:
    try:
        reached = _bind(config, outward)
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"{config.listen}: {error.strerror or error}"
        return Finding(Verdict.BAD, what, why, "listen on an address of this machine, and a free port")
    host, port = split_address("listen", config.listen)
    where = f"{config.listen}{' (any free port)' if port == 0 else ''}"
    if is_loopback(host):
        advice = (
            ""
            if config.secret_file is None
            else "other machines can't reach it: set listen to a network address"
        )
        return Finding(Verdict.NOTE if advice else Verdict.GOOD, what, f"{where}: this machine only", advice)
    return Finding(Verdict.GOOD, what, f"{where}: other machines with the secret reach it at {reached}")


def _bind(config: Config, outward: Sequence[str]) -> str:
    """Bind what a node would; return the host it would be reached by. Raises ConfigError or OSError."""
    host, port = split_address("listen", config.listen)
    names = Names()
    names.wait_for([config.listen], _NAMES_S)
    numbers = names.numbers(config.listen)
    if not numbers:
        raise ConfigError(f"listen is {config.listen!r}, and {host} can't be looked up")
    require_public("listen", config.listen, numbers)
    _try_to_bind(split_address("listen", numbers[0])[0], port)
    return reachable_host(host, outward)


def _try_to_bind(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen()


def _data_ports(config: Config) -> Finding:
    host, _ = split_address("listen", config.listen)
    first, last = config.data_port_range
    n_free = 0
    for port in range(first, last + 1):
        try:
            _try_to_bind(host, port)
        except OSError:
            continue
        n_free += 1
    says = f"{config.data_ports}: {n_free} of {last + 1 - first} are free on {host}"
    n_tenants = len(config.tenants_by_name)
    needed = DATA_PORTS * (1 + n_tenants)
    if n_free >= needed:
        return Finding(Verdict.GOOD, "data_ports", says)
    whose = f"a node with {n_tenants} tenants" if n_tenants else "a node"
    return Finding(Verdict.BAD, "data_ports", says, f"{whose} needs {needed}; widen data_ports")


def _metrics(config: Config, what: str) -> Finding:
    host = config.metrics_host or split_address("listen", config.listen)[0]
    port = int(config.metrics_port or 0)
    try:
        _try_to_bind(host, port)
    except OSError as error:
        return Finding(Verdict.BAD, what, f"{host}:{port}: {error.strerror}", "choose another metrics_port")
    return Finding(Verdict.GOOD, what, f"served at http://{host}:{port}/metrics")


def _kv_events(config: Config) -> Finding:
    what = "kv_events"
    try:
        # the node's own sockets: what they can't bind, such as both at one port, it can't either
        probe = EventPublisher(config.kv_events, config.kv_events_replay or None, "")
    except ConfigError as error:
        return Finding(Verdict.BAD, what, str(error), "choose another address or a free port for it")
    probe.close()
    if config.kv_events_replay:
        says = f"published at {config.kv_events}, repeated at {config.kv_events_replay}"
        return Finding(Verdict.GOOD, what, says)
    advice = "set kv_events_replay, so that who misses one is not wrong until the next start"
    return Finding(Verdict.NOTE, what, f"published at {config.kv_events}, and not repeated", advice)


def _indexer(config: Config) -> Finding:
    host, port = split_address("indexer", config.indexer)
    try:
        _try_to_bind(host, port)
    except OSError as error:
        return Finding(
            Verdict.BAD,
            "indexer",
            f"{config.indexer}: {error.strerror}",
            "choose another address for indexer",
        )
    return Finding(Verdict.GOOD, "indexer", f"answers at {config.indexer}")
