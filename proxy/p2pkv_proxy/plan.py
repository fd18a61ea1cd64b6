"""What the command line and its files ask for: all that the router, and each of its workers, goes by.

A plan never changes. When a file has, another plan takes its place, which differs in what that file says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from p2pkv.cli.logs import Format, Level
from p2pkv.control.secret import ClusterKeys
from p2pkv.instances.heartbeat import Instance
from p2pkv_proxy.api_keys import ApiKeys
from p2pkv_proxy.neighbourhood import Around
from p2pkv_proxy.settings import Overrides, Settings
from p2pkv_proxy.tls import Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where that lies which is read again when it changes; None: it is not in a file."""

    settings: Path | None = None
    instances: Path | None = None
    api_keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    engines_ca: Path | None = None
    engines_key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for. What is in :class:`Files` was read from there."""

    settings: Settings
    """As options say, for the router as a whole; see :attr:`in_force`."""
    prefill_policy: str = "prefix"
    decode_policy: str = "least_loaded"
    overrides: Overrides = field(default_factory=Overrides)
    """What the file of settings says instead."""
    files: Files = field(default_factory=Files)
    instances: tuple[Instance, ...] = ()
    file_instances: tuple[Instance, ...] = ()
    heartbeats: str | None = None
    """``HOST:PORT`` to take heartbeats on; None takes none."""
    lifetime: float = 10.0
    join: tuple[str, ...] = ()
    keys: ClusterKeys | None = None
    has_own_secret: bool = True
    api_keys: ApiKeys | None = field(default=None, repr=False)
    """Who may use the router; None: everybody."""
    certificate: Certificate | None = None
    """For TLS; without it clients speak plain HTTP."""
    engines_ca: str | None = None
    """Authorities whose certificates are believed of engines with https, in PEM; None: the system's."""
    engines_key: bytes | None = field(default=None, repr=False)
    """What engines are told instead of the client's key."""
    access_log: str | None = None
    """The file to write a line to for each request; ``-``: stdout."""
    logs: tuple[Level, Format] = (Level.WARNING, Format.TEXT)
    """The least that is written to stderr, and how."""
    tracing: bool = False
    """Requests have spans of OpenTelemetry."""
    n_workers: int = 1
    """Processes that serve the port, of which this is one."""
    ext_proc: str | None = None
    """``HOST:PORT`` to answer Envoy on; None: nowhere."""
    replicas: tuple[str, ...] = ()
    """Heartbeat addresses of routers beside this one; those that engines or nodes know need not be named."""
    advertise: str = ""
    """The host that engines and other routers reach this one by; empty: what it listens on."""

    @property
    def in_force(self) -> Settings:
        """The settings of one worker, with what the file of settings says in place of options."""
        return replace(self.settings, **self.overrides.settings).shared(self.n_workers)

    @property
    def policies(self) -> tuple[str, str]:
        """The names of the policies for prefills and for decodes."""
        overrides = self.overrides
        return overrides.prefill_policy or self.prefill_policy, overrides.decode_policy or self.decode_policy

    @property
    def listed(self) -> dict[str, Instance]:
        """All instances that the operator names, by id. Of one that is named twice the file's word counts."""
        return {instance.id: instance for instance in (*self.instances, *self.file_instances)}

    @property
    def authorization(self) -> bytes | None:
        """What engines are told instead of the client's ``Authorization``; b"": nothing. None: the client's own."""
        if self.engines_key is not None:
            return b"Bearer " + self.engines_key
        return b"" if self.api_keys is not None else None

    @property
    def around(self) -> Around | None:
        """What is known of others; None where nobody is listened to."""
        if self.heartbeats is None or self.keys is None:
            return None
        return Around(
            heartbeats=self.heartbeats,
            keys=self.keys,
            has_own_secret=self.has_own_secret,
            join=self.join,
            replicas=self.replicas,
            advertise=self.advertise,
        )
