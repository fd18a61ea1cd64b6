"""What lets this node into its cluster, and the others to it."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from p2pkv.address import is_loopback, reachable_host, require_public, split_address
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.join import examine_join
from p2pkv.cli.doctor.store import examine_store
from p2pkv.config import DATA_PORTS, Config
from p2pkv.control.host_names import Names
from p2pkv.control.secret import MIN_SECRET_BYTES, ClusterKeys, cluster_keys, private_secret_path
from p2pkv.errors import ConfigError
from p2pkv.kv_events.publisher import EventPublisher

_NAMES_S = 2.0


def examine_cluster(config: Config) -> Iterator[Finding]:
    """Look at the secret and the addresses."""
    yield Finding(Verdict.GOOD, "cluster", f"{config.cluster!r}; nodes of another name are refused")
    secret, keys = _secret(config)
    yield secret
    yield _listen(config)
    if config.data_ports:
        yield _data_ports(config)
    if config.metrics_port:
        yield _metrics(config)
    if config.kv_events:
        yield _kv_events(config)
    if secret.verdict is not Verdict.BAD:
        if config.store is None or config.join_addresses:
            yield from examine_join(config, keys)
        if config.store is not None:
            yield from examine_store(config, config.store, keys)


def _secret(config: Config) -> tuple[Finding, ClusterKeys | None]:
    """Look at the secret without making one, and read the keys."""
    kind = "secret_file"
    if config.secret_file is not None:
        path = Path(config.secret_file)
    else:
        kind = "private secret, for this user's nodes on this machine"
        try:
            path = private_secret_path()
            if not path.exists():
                _try_to_write_below(path.parent)
                says = f"none is set; a private one will be made at {path}, for this user's nodes here"
                return Finding(Verdict.GOOD, "secret", says), None
        except ConfigError as error:
            return Finding(Verdict.BAD, "secret", str(error), "set secret_file"), None
        except OSError as error:
            says = f"none is set, and a private one can't be made at {path}: {error.strerror}"
            return Finding(Verdict.BAD, "secret", says, "set secret_file, or XDG_STATE_HOME"), None
    try:
        cluster_keys(str(path))
    except ConfigError as error:
        return Finding(Verdict.BAD, "secret", str(error), _secret_advice(path)), None
    try:
        keys = cluster_keys(str(path), config.accepted_secret_files)
    except ConfigError as error:
        advice = "have accepted_secret_files name secrets that are valid as well, or leave it out"
        return Finding(Verdict.BAD, "secret", str(error), advice), None
    besides = f"; accepted besides: {', '.join(config.accepted_secret_files)}" if keys.accepted else ""
    return Finding(Verdict.GOOD, "secret", f"{path} ({kind}){besides}"), keys


def _try_to_write_below(folder: Path) -> None:
    """Raise OSError if nothing can be made where ``folder`` is, or will be; leaves nothing there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryDirectory(prefix=".p2pkv-doctor-", dir=there):
        pass


def _secret_advice(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return f"make it: (umask 077; head -c 32 /dev/urandom | base64 > {path}), the same on every node"
    return f"chmod 600 {path}" if mode & 0o077 else f"put at least {MIN_SECRET_BYTES} random bytes into it"


def _listen(config: Config) -> Finding:
    try:
        reached = _bind(config)
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else f"{config.listen}: {error.strerror or error}"
        return Finding(Verdict.BAD, "listen", why, "listen on an address of this machine, and a free port")
    host, port = split_address("listen", config.listen)
    where = f"{config.listen}{' (any free port)' if port == 0 else ''}"
    if is_loopback(host):
        advice = (
            ""
            if config.secret_file is None
            else "other machines can't reach it: set listen to a network address"
        )
        return Finding(
            Verdict.NOTE if advice else Verdict.GOOD, "listen", f"{where}: this machine only", advice
        )
    return Finding(Verdict.GOOD, "listen", f"{where}: other machines with the secret reach it at {reached}")


def _bind(config: Config) -> str:
    """Bind what a node would; return the host it would be reached by. Raises ConfigError or OSError."""
    host, port = split_address("listen", config.listen)
    names = Names()
    names.wait_for([config.listen], _NAMES_S)
    numbers = names.numbers(config.listen)
    if not numbers:
        raise ConfigError(f"listen is {config.listen!r}, and {host} can't be looked up")
    require_public("listen", config.listen, numbers)
    _try_to_bind(split_address("listen", numbers[0])[0], port)
    return reachable_host(host, config.outward_addresses)


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


def _metrics(config: Config) -> Finding:
    host = config.metrics_host or split_address("listen", config.listen)[0]
    port = int(config.metrics_port or 0)
    try:
        _try_to_bind(host, port)
    except OSError as error:
        return Finding(
            Verdict.BAD, "metrics", f"{host}:{port}: {error.strerror}", "choose another metrics_port"
        )
    return Finding(Verdict.GOOD, "metrics", f"served at http://{host}:{port}/metrics")


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
