"""The page at ``/``: instances, pairs, times and other routers at a glance, as nodes' pages show theirs.

It asks this router for ``/metrics`` and ``/router.json`` and nobody else. What it is made of is that of nodes' pages.
"""

from __future__ import annotations

import time
from importlib.resources import files

from p2pkv.dashboard.site import ALONE
from p2pkv_proxy.registry import Registry

HEADERS = ALONE
FILES = {
    "/": ("p2pkv_proxy", "status_page.html", "text/html"),
    "/status_page.js": ("p2pkv_proxy", "status_page.js", "text/javascript"),
    "/page.css": ("p2pkv.dashboard", "page.css", "text/css"),
    "/charts.js": ("p2pkv.dashboard", "charts.js", "text/javascript"),
    "/blocks.js": ("p2pkv.dashboard", "blocks.js", "text/javascript"),
}
"""By path: where it lies, and what it is."""


def file_at(path: str) -> tuple[bytes, str]:
    """Return what is served there, one of :data:`FILES`, and its type."""
    package, name, kind = FILES[path]
    return files(package).joinpath(name).read_bytes(), kind


def snapshot(registry: Registry) -> list[dict[str, object]]:
    """Return what is known of each instance, for programs."""
    now = time.monotonic()
    return [
        {
            "id": tracked.id,
            "role": tracked.instance.role.value,
            "mode": tracked.instance.mode.value,
            "url": tracked.instance.url,
            "model": tracked.instance.model,
            "state": tracked.state.value,
            "breaker": tracked.breaker.phase.value,
            "in_flight": tracked.in_flight,
            "tokens": tracked.n_tokens,
            "queue_seconds": tracked.own_queue(now),
            "replica_requests": tracked.n_requests_replicas,
            "replica_tokens": tracked.n_tokens_replicas,
            "reported": tracked.load.running + tracked.load.waiting,
            "kv_tokens": tracked.load.kv_tokens,
            "kv_capacity": tracked.load.kv_capacity,
            "capacity": tracked.instance.capacity,
            "served": tracked.served,
        }
        for tracked in sorted(registry, key=lambda tracked: (tracked.instance.role.value, tracked.id))
    ]


def reading(registry: Registry, *, in_flight: int, n_workers: int) -> dict[str, object]:
    """Return what the page shows besides metrics, as it is at this worker."""
    return {
        "at": time.time(),
        "in_flight": in_flight,
        "workers": n_workers,
        "instances": snapshot(registry),
        "gone": [
            {
                "at": gone.at,
                "id": gone.instance.id,
                "role": gone.instance.role.value,
                "url": gone.instance.url,
                "why": gone.why,
                "served": gone.served,
            }
            for gone in registry.gone.values()
        ],
        "replicas": _replicas(registry),
        "n_replicas": registry.n_replicas,
        "events": [
            {"at": event.at, "instance": event.instance, "text": event.text} for event in registry.events
        ],
    }


def _replicas(registry: Registry) -> list[dict[str, object]]:
    """Return who is heard by this process; with several workers that is their parent."""
    if registry.replicas is None:
        return []
    now = time.monotonic()
    return [
        {
            "name": name,
            "address": replica.address,
            "heard_seconds_ago": max(0.0, now - replica.heard),
            "requests": sum(n_requests for n_requests, _ in replica.at.values()),
            "tokens": sum(n_tokens for _, n_tokens in replica.at.values()),
        }
        for name, replica in sorted(registry.replicas.heard.replicas.items())
    ]
