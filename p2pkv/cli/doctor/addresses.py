"""The addresses that a node listens at: each is bound for a moment, as the node would.

The doctor is asked about a node that runs as well, when an alert says so or before it is upgraded. What that node has
is no fault then.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from p2pkv.address import is_loopback, reachable_host, require_public, split_address
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.outsider import Outsider
from p2pkv.config import DATA_PORTS, Config
from p2pkv.control.host_names import Names
from p2pkv.control.listening import is_common
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.errors import ConfigError, ControlError
from p2pkv.kv_events.publisher import EventPublisher

_NAMES_S = 2.0
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node would be reached, and who of its cluster answers there already."""

    address: str
    node_id: str

    def is_of(self, config: Config) -> bool:
        """Whether that is the node of these settings itself."""
        return self.node_id == config.node_id


def held_place(config: Config, keys: ClusterKeys | None, outward: Sequence[str]) -> Place | None:
    """Return who has ``listen``, if that is a node of the same secret. ``outward``: the way to peers."""
    host, port = split_address("listen", config.listen)
    if keys is None or port == 0:
        return None
    with suppress(ConfigError, ControlError), Outsider(keys) as outsider:
        reached = reachable_host(host, outward)
        address = f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"
        report, _ = outsider.members([address], _ANSWER_S)
        return Place(address, report.sender)
    return None


def examine_addresses(config: Config, held: Place | None) -> Iterator[Finding]:
    """Look at ``listen``, and at those of the others that are set. ``held``: who has ``listen``."""
    runs = held is not None and held.is_of(config)
    yield _listen(config, "listen", config.outward_addresses, held)
    if config.data_ports:
        yield _unless(runs, _data_ports(config))
    if config.metrics_port:
        yield _unless(runs, _metrics(config, "metrics"))
    if config.kv_events:
        yield _unless(runs, _kv_events(config))
    if config.indexer:
        yield _unless(runs, _indexer(config))


def examine_tenants_addresses(config: Config, name: str, around: Config) -> Iterator[Finding]:
    """Look at those that are set for a tenant; its data ports are counted with those of the node ``around`` it."""
    outward = around.outward_addresses  # the tenant's node joins nobody by an address
    if split_address("listen", config.listen)[1]:
        yield _listen(config, f"listen of {name}", outward, held_place(config, _keys(config), outward))
    if config.metrics_port:
        held = held_place(around, _keys(around), outward)
        runs = held is not None and held.is_of(around)
        yield _unless(runs, _metrics(config, f"metrics of {name}"))


def _keys(config: Config) -> ClusterKeys:
    return cluster_keys(config.secret_file, config.accepted_secret_files)


def _unless(runs: bool, finding: Finding) -> Finding:
    """Take it for no fault that an address is in use where the node of these settings runs already."""
    is_in_use = finding.what == "data_ports" or os.strerror(errno.EADDRINUSE) in finding.says
    if finding.verdict is not Verdict.BAD or not runs or not is_in_use:
        return finding
    return dataclasses.replace(
        finding, verdict=Verdict.NOTE, advice="the node of these settings runs already"
    )


def _listen(config: Config, what: str, outward: Sequence[str], held: Place | None) -> Finding:
    try:
        reached = _bind(config, outward)
    except (ConfigError, OSError) as error:
        if held is not None and held.is_of(config):
            return Finding(Verdict.NOTE, what, f"{config.listen}: node {config.node_id!r} runs there already")
        if held is not None and _is_joined(held.address, config.join_addresses):
            says = f"{config.listen}, a join address too, is that of {held.node_id}: a node here takes a free port"
            advice = "give it a listen of its own where a firewall stands between nodes"
            return Finding(Verdict.NOTE, what, says, advice)
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


def _is_joined(address: str, join: Sequence[str]) -> bool:
    names = Names()
    names.wait_for([address, *join], _NAMES_S)
    return is_common(address, join, names)


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
