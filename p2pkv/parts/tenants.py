"""A node's tenants: whether their secrets are secrets, what each is started with, and all of them while they run.

A tenant's node is a whole node, in the cluster of the tenant's secret. All that the node around it does for it is to
start and end it, to tell other members where it is, and to show some of its figures.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from p2pkv.cache.call_limit import CallLimit, LimitedCache
from p2pkv.cache.drained import Drained
from p2pkv.cache.page_cache import PageCache
from p2pkv.config import Config
from p2pkv.config.tenants import tenant_config
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.directory.membership.base import Membership
from p2pkv.directory.membership.control_network import tell_once
from p2pkv.directory.membership.engines import make_engine
from p2pkv.directory.membership.registered import RegisteredMembership
from p2pkv.directory.registry.among_members import RecordExchange
from p2pkv.directory.registry.seal import Seal
from p2pkv.directory.registry.store import Registry
from p2pkv.errors import ClosedError, ConfigError, P2PKVError
from p2pkv.memory.available import available_memory, require_memory
from p2pkv.metrics import Metrics
from p2pkv.parts.cache import CacheParts
from p2pkv.parts.control import ControlParts

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_SHOWN = {
    "p2pkv_tenant_members": "p2pkv_members",
    "p2pkv_tenant_pool_capacity_bytes": "p2pkv_pool_capacity_bytes",
    "p2pkv_tenant_pool_used_bytes": "p2pkv_pool_used_bytes",
    "p2pkv_tenant_pool_pages": "p2pkv_pool_pages",
    "p2pkv_tenant_disk_used_bytes": "p2pkv_disk_used_bytes",
    "p2pkv_tenant_limited_calls_total": "p2pkv_limited_calls_total",
}
"""What the node around them shows of its tenants, and what their own nodes call it."""


class Tenant(NamedTuple):
    """What a tenant's node is started with."""

    name: str
    config: Config
    seal: Seal
    """With it the records are sealed by which the tenant's nodes find each other."""
    most_calls: int
    """Calls under way at once; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands beside others of its process: around tenants' nodes, or as one, or alone."""

    tenants: Sequence[Tenant] = ()
    registry: Registry | None = None
    """Of a tenant's node: where it finds the tenant's other nodes."""
    limit: CallLimit | None = None
    """Of a tenant's node, if it has one."""


def plan_tenants(config: Config) -> list[Tenant]:
    """Return what the tenants of a node are started with.

    Raises :class:`~p2pkv.errors.ConfigError` for a secret that can't be read or that somebody else has, and for pools
    that the machine has no memory for.
    """
    if not config.tenants:
        return []
    owners: dict[bytes, str] = {}
    own = cluster_keys(config.secret_file, config.accepted_secret_files)
    for pair in own.all:
        owners[pair.public] = "the cluster"
    planned = []
    for name, settings in config.tenants_by_name.items():
        own_config = tenant_config(config, name)
        try:
            keys = cluster_keys(own_config.secret_file, own_config.accepted_secret_files)
        except ConfigError as error:
            raise ConfigError(f"tenants: {name}: {error}") from error
        for pair in keys.all:
            other = owners.setdefault(pair.public, f"tenant {name}")
            if other != f"tenant {name}":
                raise ConfigError(
                    f"tenants: {name}: its secret in {own_config.secret_file} is also that of {other}, so whoever has "
                    "one could read what is the other's; give each a secret of its own, for example from: head -c 32 "
                    "/dev/urandom | base64"
                )
        limit = settings["requests"]
        assert isinstance(limit, int)
        planned.append(Tenant(name, own_config, Seal(keys, own_config.cluster), limit))
    if config.keeper:
        return planned  # it may have the pools already, which each node finds out for itself
    total = config.registered_nbytes + sum(tenant.config.registered_nbytes for tenant in planned)
    try:
        require_memory(total, available_memory())
    except ConfigError as error:
        raise ConfigError(f"with the pools of its tenants: {error}") from error
    return planned


def reached_as(config: Config, address: str) -> Config:
    """Return a tenant's settings with the host of the node around it, at ``address``, where they name a wildcard.

    A tenant's node has no join address that would tell which of this machine's addresses peers reach.
    """
    host, _, port = config.listen.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "*"):
        return config
    return dataclasses.replace(config, listen=f"{address.rpartition(':')[0]}:{port}")


def membership_engine(config: Config, keys: ClusterKeys, place: Place) -> Callable[..., Membership]:
    """Return what a node's membership engine is made by. Raises ConfigError if it can't be had."""
    if place.registry is None:
        return make_engine(config.membership, keys, config.cluster)
    return functools.partial(RegisteredMembership, registry=place.registry, seal=Seal(keys, config.cluster))


def limited(cache: PageCache, limit: CallLimit, metrics: Metrics) -> LimitedCache:
    """Return the calls of a tenant's cache, as many at a time as its limit lets in."""
    metrics.watch(limit.readings)
    return LimitedCache(cache, limit)


def carry_records(
    config: Config, control: ControlParts, place: Place, undo: ExitStack
) -> RecordExchange | None:
    """Have the records of tenants' nodes told among members, where this node has tenants."""
    if not place.tenants:
        return None
    seals = {tenant.name: tenant.seal for tenant in place.tenants}
    exchange = RecordExchange(
        seals, config.cluster, config.node_id, functools.partial(tell_once, control.gossip)
    )
    undo.callback(exchange.close)
    return exchange


class TenantNode(Protocol):
    """What the node around them asks of its tenants' nodes."""

    def close(self) -> None:
        """Leave the tenant's cluster."""

    def begin_drain(self, seconds: float) -> None:
        """Begin to hand pages over."""

    @property
    def is_closed(self) -> bool:
        """Whether it has left, or is about to."""

    @property
    def drained(self) -> Drained | None:
        """What became of them."""

    def counters(self) -> dict[str, float]:
        """Every counter and reading."""


class AroundTenants(Protocol):
    """What tenants' nodes ask of the node around them."""

    metrics: Metrics

    @property
    def caching(self) -> CacheParts | None:
        """Its cache, if it has one."""


N = TypeVar("N", bound=TenantNode)


class TenantNodes(Generic[N]):
    """The tenants' nodes of one node, while they run. They are started and closed by its thread alone."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        records: RecordExchange | None,
        start: Callable[[Config, Place], N],
    ) -> None:
        """Start all, or none: an error says whose it is. Without tenants there are no ``records`` either."""
        self.by_name: dict[str, N] = {}
        if records is None:
            return
        with ExitStack() as undo:
            for tenant in tenants:
                limit = CallLimit(tenant.most_calls) if tenant.most_calls else None
                place = Place(registry=records.registry(tenant.name), limit=limit)
                try:
                    node = start(tenant.config, place)
                except P2PKVError as error:
                    raise type(error)(f"tenants: {tenant.name}: {error}") from error
                undo.callback(node.close)
                self.by_name[tenant.name] = node
                _log.info("tenant %s is served, in its cluster %r", tenant.name, tenant.config.cluster)
            undo.pop_all()

    def attend(self, around: AroundTenants) -> None:
        """Be shown by the node around them, and drain when it is told to, whoever tells it."""
        if not self.by_name:
            return
        around.metrics.watch_labelled(self.readings)
        caching = around.caching
        if caching is None:
            return
        tell_members = caching.on_drain

        def on_drain(seconds: float) -> None:
            tell_members(seconds)
            self.begin_drain(seconds)  # which changes nothing where they have begun

        caching.on_drain = on_drain
        if (seconds := caching.drainer.seconds) is not None:
            self.begin_drain(seconds)  # it was told to while they were started

    def close(self) -> None:
        """Have all leave their clusters, whatever one of them raises. Idempotent."""
        with ExitStack() as undo:
            for node in self.by_name.values():
                undo.callback(node.close)

    def begin_drain(self, seconds: float) -> None:
        """Have all hand their pages over; who is closed has done with his."""
        for node in self.by_name.values():
            with suppress(ClosedError):
                node.begin_drain(seconds)

    def drain_with(self, own: Drained, deadline: float) -> Drained:
        """Wait until all have drained, which they have begun to; return that with ``own``.

        One that is late by ``deadline``, since somebody else has told it to take longer, is not waited for.
        """
        every = [own]
        for name, node in self.by_name.items():
            while node.drained is None and not node.is_closed and time.monotonic() < deadline:
                time.sleep(_LOOK_S)  # it is looked at again; nobody says so
            if not node.is_closed:
                every.append(node.drained or Drained(0, 0, 0, {}, f"tenant {name} is not done yet", 0.0))
        return _together(every)

    def drained(self, own: Drained | None) -> Drained | None:
        """Return what became of the pages of all nodes and of ``own``; None until all have drained that are open."""
        every = [own, *(node.drained for node in self.by_name.values() if not node.is_closed)]
        known = [drained for drained in every if drained is not None]
        return _together(known) if len(known) == len(every) else None

    def readings(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return what is shown of tenants, by the names of the metrics and of the tenants."""
        read = {}
        for name, node in self.by_name.items():
            with suppress(ClosedError):
                read[(name,)] = node.counters()
        return {
            metric: {labels: counted[source] for labels, counted in read.items() if source in counted}
            for metric, source in _SHOWN.items()
        }


def _together(every: Sequence[Drained]) -> Drained:
    receivers: dict[str, int] = {}
    for drained in every:
        for node_id, n_pages in drained.receivers.items():
            receivers[node_id] = receivers.get(node_id, 0) + n_pages
    return Drained(
        n_pages=sum(drained.n_pages for drained in every),
        n_handed_over=sum(drained.n_handed_over for drained in every),
        n_adopted=sum(drained.n_adopted for drained in every),
        receivers=receivers,
        reason="; ".join(dict.fromkeys(drained.reason for drained in every if drained.reason)),
        seconds=max(drained.seconds for drained in every),
    )
