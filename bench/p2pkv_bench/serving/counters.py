"""Counters of routers and p2pkv nodes, read from their metrics pages before and after a round."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence

Counts = Mapping[str, float]


def read(urls: Sequence[str]) -> dict[str, float]:
    """Add up the samples of all pages; a page that can't be read counts nothing."""
    total: defaultdict[str, float] = defaultdict(float)
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=5) as page:  # noqa: S310 - the user's own
                lines = page.read().decode(errors="replace").splitlines()
        except (OSError, ValueError):
            continue
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name.startswith("p2pkv_"):
                total[name] += float(value)
    return dict(total)


def grown(before: Counts, after: Counts) -> dict[str, float]:
    """Return by how much each has grown."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def pages(growth: Counts) -> dict[str, float]:
    """Return the pages that nodes fetched, by source, and those they computed: what they published."""
    found = {}
    for name, value in growth.items():
        if name.startswith("p2pkv_fetched_pages_total{") and value:
            found[name.split('"')[1]] = value
    computed = growth.get("p2pkv_published_pages_total", 0.0)
    return found | {"computed": computed} if found or computed else {}


def overhead(growth: Counts) -> dict[str, float]:
    """Return the router's own seconds a request: the mean, and a bound of the 99th percentile."""
    name = "p2pkv_proxy_overhead_seconds"
    n = growth.get(f"{name}_count", 0.0)
    if not n:
        return {}
    bounds = sorted(
        (float(key.split('"')[1].replace("+Inf", "inf")), value)
        for key, value in growth.items()
        if key.startswith(f"{name}_bucket{{")
    )
    p99 = next((bound for bound, value in bounds if value >= 0.99 * n), float("inf"))
    return {"mean": growth[f"{name}_sum"] / n, "p99_below": p99}
