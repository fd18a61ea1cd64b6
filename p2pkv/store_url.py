"""Where members leave their records, as the setting ``membership`` says it: ``etcd://HOST:PORT,HOST:PORT?option=value``.

``docs/membership.md`` lists the options. What is wrong with a URL is said when the settings are read, before anything
is connected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl

from p2pkv.address import split_address
from p2pkv.errors import ConfigError
from p2pkv.values import as_number, nearest, shown

KUBERNETES = "kubernetes"
_OPTIONS = {
    "etcd": ("password_file", "prefix", "ttl", "user"),
    "etcds": ("ca", "cert", "key", "password_file", "prefix", "ttl", "user"),
    KUBERNETES: ("ca", "namespace", "token_file", "ttl"),
}
"""Which options each scheme has; etcds is etcd over TLS."""
_CREDENTIALS = {
    "etcd": "write etcd://HOST:PORT?user=NAME&password_file=FILE",
    "etcds": "write etcds://HOST:PORT?user=NAME&password_file=FILE",
    KUBERNETES: "write kubernetes://HOST:PORT?token_file=FILE",
}
"""How each scheme is told who asks."""
STORES = ("etcd://HOST:PORT", "etcds://HOST:PORT", KUBERNETES)
"""How each of them is named, for who has named none."""
MIN_TTL, MAX_TTL = 10, 3600
_TTL = {"etcd": 30, "etcds": 30, KUBERNETES: 600}
"""Seconds. Each renewal of a Lease is told to all who follow; one of an etcd lease to nobody."""
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod finds its service account."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store of records, and how to speak to it."""

    scheme: str
    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each of its servers."""
    ttl: int
    """Seconds after which a record goes whose node no longer renews it."""
    prefix: str = "/p2pkv"
    """What every key begins with; the cluster's name follows."""
    ca: str | None = None
    """File of the authorities that its certificate comes from; without one those that this machine trusts."""
    cert: str | None = None
    """File of this node's certificate, where the store asks for one, and that of its key."""
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    namespace: str | None = None
    """Of Kubernetes; without one that of the pod."""
    token_file: str = f"{_ACCOUNT}/token"
    namespace_file: str = f"{_ACCOUNT}/namespace"

    @property
    def is_tls(self) -> bool:
        """Whether its servers are spoken to over TLS."""
        return self.scheme != "etcd"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its servers' addresses, ``HOST:PORT``."""
        return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"{self.scheme}://{','.join(self.addresses)}"


def is_store_url(membership: str) -> bool:
    """Whether the setting names a store, and not an engine."""
    return "://" in membership or membership == KUBERNETES


def without_user(text: str) -> str:
    """Return an address as it may stand in messages, which are logged: a password may stand before its @."""
    user, at, rest = text.rpartition("@")
    scheme, slashes, _ = user.partition("://")
    return f"{scheme * bool(slashes)}{slashes}...@{rest}" if at else text


def read_store_url(text: str) -> StoreUrl:
    """Return what a URL says. Raises :class:`~p2pkv.errors.ConfigError` for whatever is wrong with it."""
    scheme, _, rest = text.partition("://")
    if scheme not in _OPTIONS:
        raise ConfigError(
            f"membership {shown(without_user(text))} is of no kind that p2pkv knows: it begins with one of "
            f"{', '.join(f'{known}://' for known in _OPTIONS)}{nearest(scheme, _OPTIONS)}"
        )
    servers, _, query = rest.partition("?")
    addresses = [part.strip() for part in servers.removesuffix("/").split(",") if part.strip()]
    if scheme == KUBERNETES and not addresses:
        addresses = [_server_of_this_pod()]
    if not addresses:
        raise ConfigError(f"membership {shown(text)} names no server; write {scheme}://HOST:PORT,HOST:PORT")
    may_end_a_password = "@" in query and "=" not in query.partition("@")[0]
    if "@" in servers or may_end_a_password:
        # not repeated here: messages are logged, and a password may stand in it
        raise ConfigError(
            f"membership has a user before the @ of a {scheme}:// address, where anybody would read it in logs; "
            + _CREDENTIALS[scheme]
        )
    endpoints = tuple(dict.fromkeys(split_address("membership", address) for address in addresses))
    if any(port == 0 for _, port in endpoints):
        raise ConfigError(f"membership {shown(text)} needs ports other than 0")
    options = _read_options(scheme, query)
    ttl = int(as_number("membership: ttl", options.pop("ttl", str(_TTL[scheme])), int))
    if scheme == KUBERNETES:
        options.setdefault("ca", f"{_ACCOUNT}/ca.crt")
    url = StoreUrl(scheme, endpoints, ttl, **options)
    _check(url)
    return url


def _server_of_this_pod() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port:
        raise ConfigError(
            "membership is 'kubernetes', but this is no pod: KUBERNETES_SERVICE_HOST and _PORT are not set; name the "
            "API server as in kubernetes://HOST:PORT?namespace=...&ca=...&token_file=..."
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_options(scheme: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"membership: {shown(query)} is no list of option=value: {error}") from error
    for name, value in pairs:
        if name not in _OPTIONS[scheme]:
            tls = (
                "; it is for TLS, which etcds:// has"
                if name in _OPTIONS["etcds"] and scheme == "etcd"
                else ""
            )
            raise ConfigError(
                f"membership: {scheme}:// has no option {shown(name)}{tls or nearest(name, _OPTIONS[scheme])}"
            )
        if name in options:
            raise ConfigError(f"membership has the option {name!r} twice")
        if not value:
            raise ConfigError(f"membership: option {name!r} is empty")
        options[name] = value
    return options


def _check(url: StoreUrl) -> None:
    if (url.cert is None) != (url.key is None):
        raise ConfigError("membership: cert and key go together, and one of them is missing")
    if (url.user is None) != (url.password_file is None):
        raise ConfigError("membership: user and password_file go together, and one of them is missing")
    if not url.prefix.startswith("/") or not url.prefix.isprintable():
        raise ConfigError(f"membership: prefix must begin with '/', not be {shown(url.prefix)}")
    if url.namespace is not None and not url.namespace.replace("-", "").isalnum():
        raise ConfigError(f"membership: namespace must be the name of one, not {shown(url.namespace)}")
    if not MIN_TTL <= url.ttl <= MAX_TTL:
        raise ConfigError(f"membership: ttl must be {MIN_TTL} to {MAX_TTL} seconds, not {url.ttl}")
