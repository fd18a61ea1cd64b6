"""Addresses, ``HOST:PORT``: read from settings, and made for peers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from p2pkv.errors import ConfigError


def split_address(name: str, address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (IPv6 hosts in brackets)."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name} must be HOST:PORT, not {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_endpoint(name: str, endpoint: str, *, is_exposed: bool) -> None:
    """Raise :class:`ConfigError` unless ``endpoint`` is ``tcp://HOST:PORT`` of loopback, or ``is_exposed``."""
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{name} must be tcp://HOST:PORT, not {endpoint[:100]!r}")
    host, _ = split_address(name, endpoint.removeprefix("tcp://"))
    if not is_exposed and not is_loopback(host):
        raise ConfigError(
            f"{name} is {endpoint!r}, which other machines can reach, and whoever does sees which pages this node "
            "has; set kv_events_exposed to allow that, or listen on 127.0.0.1"
        )


def numbered_endpoint(endpoint: str, index: int) -> str:
    """Return the endpoint of a server's process number ``index``: that many ports further, but for port 0 and none."""
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + index}" if endpoint and int(port) else endpoint


def leads_to_loopback(number: str) -> bool:
    """Whether only this machine can reach ``number``, an address whose host is written as a number."""
    return is_loopback(split_address("address", number)[0])


def require_public(name: str, address: str, numbers: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for a host by name that others are to reach, and whose ``numbers`` are loopback's."""
    host, _ = split_address(name, address)
    if not is_loopback(host) and numbers and all(map(leads_to_loopback, numbers)):
        raise ConfigError(
            f"{name} is {address!r}, but {host} leads to {split_address(name, numbers[0])[0]} on this machine "
            "(/etc/hosts), where no other machine could reach this node; write this machine's network address, or "
            "127.0.0.1 for this machine only"
        )


def can_listen_on(address: str) -> bool:
    """Whether ``address`` is one of this host's, written as a number, and free. A name is not asked for: False."""
    host, port = split_address("address", address)
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, ValueError):
        return False
    return True


def reachable_host(host: str, join: Sequence[str]) -> str:
    """Return the host that peers reach a node at that listens on ``host``, which may be a wildcard.

    For a wildcard that is the address this machine sends from towards the first ``join`` address. Raises
    :class:`~p2pkv.errors.ConfigError` if that can't be told.
    """
    if host not in ("0.0.0.0", "::", "*"):
        return host
    for address in join:
        target, port = split_address("join", address)
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, port))  # sends nothing; asks for the route only
                found = str(probe.getsockname()[0])
                if not is_loopback(found) or is_loopback(
                    target
                ):  # the name of this host leads to its loopback
                    return found
        except OSError:
            continue
    raise ConfigError(
        f"listen is {host}, and no join address tells which of this machine's addresses peers reach; "
        "listen on that address"
    )
