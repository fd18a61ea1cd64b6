"""What a cluster's nodes tell of their tenants, for ``p2pkv status``: they are in none of its views."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rich.text import Text

_SERIES = re.compile(r'(p2pkv_tenant_\w+)\{tenant="(.*)"\}')


class TenantSight(NamedTuple):
    """One tenant, as the nodes that serve it tell."""

    name: str
    nodes: list[str]
    """Of the cluster asked, those that serve it."""
    n_members: int
    """Of the tenant's own cluster, as the node that sees most of it does."""
    used_nbytes: float
    capacity_nbytes: float
    n_pages: float
    limited_calls: float


def tenants(counters: Mapping[str, Mapping[str, float]]) -> list[TenantSight]:
    """Return the tenants that nodes tell of, given what each node counts."""
    figures: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for node_id, series in counters.items():
        for name, value in series.items():
            found = _SERIES.fullmatch(name)
            if found is not None:
                figures[found[2]][node_id][found[1].removeprefix("p2pkv_tenant_")] = value
    return [_sight(name, nodes) for name, nodes in sorted(figures.items())]


def _sight(name: str, nodes: Mapping[str, Mapping[str, float]]) -> TenantSight:
    def total(figure: str) -> float:
        return sum(read.get(figure, 0.0) for read in nodes.values())

    return TenantSight(
        name,
        sorted(nodes),
        int(max(read.get("members", 0.0) for read in nodes.values())),
        total("pool_used_bytes"),
        total("pool_capacity_bytes"),
        total("pool_pages"),
        total("limited_calls_total"),
    )


def tenant_lines(found: Iterable[TenantSight]) -> Iterator[Text]:
    """Yield what is said of tenants below a table of nodes; nothing where there are none."""
    for tenant in found:
        limited = f", {tenant.limited_calls:,.0f} calls missed at its limit" if tenant.limited_calls else ""
        used, capacity = tenant.used_nbytes / 2**20, tenant.capacity_nbytes / 2**20
        yield Text(
            f"tenant {tenant.name} at {', '.join(tenant.nodes)}: {tenant.n_members} nodes of its own cluster, "
            f"{tenant.n_pages:,.0f} pages in {used:,.1f} of {capacity:,.1f} MiB{limited}"
        )
