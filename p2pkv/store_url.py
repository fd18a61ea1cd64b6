"""Where members leave their records, as the setting ``membership`` says it: ``etcd://HOST:PORT,HOST:PORT?option=value``.

``docs/membership.md`` lists the options. What is wrong with a URL is said when the settings are read, before anything
is connected.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from p2pkv.address import split_address
from p2pkv.errors import ConfigError
from p2pkv.values import as_number, nearest, shown

SCHEMES = ("etcd", "etcds")
"""The second is etcd over TLS."""
_OPTIONS = ("ca", "cert", "key", "password_file", "prefix", "ttl", "user")
_TLS_OPTIONS = ("ca", "cert", "key")
MIN_TTL, DEFAULT_TTL, MAX_TTL = 10, 30, 3600


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store of records, and how to speak to it."""

    scheme: str
    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each of its servers."""
    prefix: str = "/p2pkv"
    """What every key begins with; the cluster's name follows."""
    ca: str | None = None
    """File of the authorities that its certificate comes from; without one those that this machine trusts."""
    cert: str | None = None
    """File of this node's certificate, where the store asks for one, and that of its key."""
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    ttl: int = DEFAULT_TTL
    """Seconds after which a record goes whose node no longer renews it."""

    @property
    def is_tls(self) -> bool:
        """Whether its servers are spoken to over TLS."""
        return self.scheme == "etcds"

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
    return "://" in membership


def read_store_url(text: str) -> StoreUrl:
    """Return what a URL says. Raises :class:`~p2pkv.errors.ConfigError` for whatever is wrong with it."""
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"membership {shown(text)} is of no kind that p2pkv knows: it begins with one of "
            f"{', '.join(f'{known}://' for known in SCHEMES)}{nearest(scheme, SCHEMES)}"
        )
    servers, _, query = rest.partition("?")
    addresses = [part.strip() for part in servers.removesuffix("/").split(",") if part.strip()]
    if not addresses:
        raise ConfigError(f"membership {shown(text)} names no server; write {scheme}://HOST:PORT,HOST:PORT")
    endpoints = tuple(dict.fromkeys(split_address("membership", address) for address in addresses))
    if any(port == 0 for _, port in endpoints):
        raise ConfigError(f"membership {shown(text)} needs ports other than 0")
    options = _read_options(query)
    ttl = int(as_number("membership: ttl", options.pop("ttl", str(DEFAULT_TTL)), int))
    url = StoreUrl(scheme, endpoints, ttl=ttl, **options)
    _check(url)
    return url


def _read_options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"membership: {shown(query)} is no list of option=value: {error}") from error
    for name, value in pairs:
        if name not in _OPTIONS:
            raise ConfigError(f"membership has an unknown option {shown(name)}{nearest(name, _OPTIONS)}")
        if name in options:
            raise ConfigError(f"membership has the option {name!r} twice")
        if not value:
            raise ConfigError(f"membership: option {name!r} is empty")
        options[name] = value
    return options


def _check(url: StoreUrl) -> None:
    for name in _TLS_OPTIONS:
        if getattr(url, name) is not None and not url.is_tls:
            raise ConfigError(f"membership: {name} is for TLS; begin with {url.scheme}s:// to have it")
    if (url.cert is None) != (url.key is None):
        raise ConfigError("membership: cert and key go together, and one of them is missing")
    if (url.user is None) != (url.password_file is None):
        raise ConfigError("membership: user and password_file go together, and one of them is missing")
    if not url.prefix.startswith("/") or not url.prefix.isprintable():
        raise ConfigError(f"membership: prefix must begin with '/', not be {shown(url.prefix)}")
    if not MIN_TTL <= url.ttl <= MAX_TTL:
        raise ConfigError(f"membership: ttl must be {MIN_TTL} to {MAX_TTL} seconds, not {url.ttl}")
