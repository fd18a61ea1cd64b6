"""The page at ``/``: instances and requests at a glance, without a script from anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterable

from p2pkv_proxy.metrics import OUTCOMES, Metrics
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.tracked import Tracked

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; width: 100% }
th, td { text-align: left; padding: .25em .8em; border-bottom: 1px solid #ddd }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.ready { color: #080 } .failing, .open { color: #b00 } .draining, .starting, .half-open { color: #a60 }
"""


def snapshot(registry: Registry) -> list[dict[str, object]]:
    """Return what is known of each instance, for programs."""
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
            "reported": tracked.load.running + tracked.load.waiting,
            "capacity": tracked.instance.capacity,
            "served": tracked.served,
        }
        for tracked in sorted(registry, key=lambda tracked: (tracked.instance.role.value, tracked.id))
    ]


def render(registry: Registry, metrics: Metrics, in_flight: int) -> str:
    """Return the page."""
    rows = "".join(_row(tracked) for tracked in sorted(registry, key=lambda t: (t.instance.role.value, t.id)))
    outcomes = {
        outcome: int(
            metrics.registry.get_sample_value("p2pkv_proxy_requests_total", {"outcome": outcome}) or 0
        )
        for outcome in OUTCOMES
    }
    counts = "".join(_tr([(name, ""), (str(n), "n")]) for name, n in outcomes.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>p2pkv-proxy</title>
<meta http-equiv="refresh" content="2"><style>{_STYLE}</style>
<h1>p2pkv-proxy</h1><p>{in_flight} requests under way. <a href="/metrics">metrics</a></p>
<table><tr><th>instance<th>role<th>state<th>breaker<th class=n>requests<th class=n>tokens<th class=n>reported
<th class=n>served<th>address</tr>{rows}</table>
<table><tr><th>requests that ended<th class=n></tr>{counts}</table></html>"""


def _row(tracked: Tracked) -> str:
    instance = tracked.instance
    return _tr(
        [
            (tracked.id, ""),
            (instance.role.value, ""),
            (tracked.state.value, tracked.state.value),
            (tracked.breaker.phase.value, tracked.breaker.phase.value),
            (str(tracked.in_flight), "n"),
            (str(tracked.n_tokens), "n"),
            (str(tracked.load.running + tracked.load.waiting), "n"),
            (str(tracked.served), "n"),
            (instance.url, ""),
        ]
    )


def _tr(cells: Iterable[tuple[str, str]]) -> str:
    return "<tr>" + "".join(f'<td class="{kind}">{html.escape(text)}' for text, kind in cells) + "</tr>"
