"""What of a cluster is worth a look: the pages that are fetched most, and the peers that are slow to read from.

Both are what nodes count anyhow. A peer is judged beside the others that are read from over the same transport, by
bytes and by pages, so that neither large pages nor small ones look slow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from rich.text import Text

from p2pkv.explain.messages import Answer

ASKED = 16
"""Pages that a node is asked for, so that those that are hot together are among them."""
SHOWN = 5
_SLOW = 3.0
"""Times as long as others; a guess: a busy machine makes it twice."""
_FEW_PAGES = 16
"""A peer that fewer were read from is not judged."""
_LATE = 0.05
"""Of a peer's reads, in batches of which most have 16 pages and more; a network that pauses makes a hundredth late."""

Counters = Mapping[str, Mapping[str, float]]
"""By node id."""


class HotPage(NamedTuple):
    """A page that is fetched often."""

    id: str
    """32 hexadecimal digits, as ``p2pkv explain --id`` takes them."""
    rate: float
    """Fetches a second, of all nodes together, at least."""
    nodes: list[str]
    """Whose calls fetch it, the most first."""


class SlowPeer(NamedTuple):
    """A node that is slower to read from than others."""

    node_id: str
    transport: str
    times: float
    """Reads take so many times as long as from others over this transport; 0 if that is not too long, or not known."""
    late_reads: float
    """Reads that were left for another holder of the pages."""
    seconds_a_gib: float
    """0 if nothing came."""


def hot_pages(answers: Iterable[Answer]) -> list[HotPage]:
    """Return the pages that all nodes together fetch most, the hottest first."""
    by_id: dict[bytes, list[tuple[float, str]]] = defaultdict(list)
    for answer in answers:
        for page in answer.hot_pages:
            by_id[page.id].append((page.rate, answer.node_id))
    pages = [
        HotPage(
            page_id.hex(), sum(rate for rate, _ in rates), [who for _, who in sorted(rates, reverse=True)]
        )
        for page_id, rates in by_id.items()
    ]
    return sorted(pages, key=lambda page: (-page.rate, page.id))[:ASKED]


def slow_peers(now: Counters, before: Counters) -> list[SlowPeer]:
    """Return the peers that were slow to read from between two readings; since the start where there is none before."""
    amounts = _amounts(now, before)
    by_transport: dict[str, dict[str, _Amount]] = defaultdict(dict)
    for (peer, transport), amount in amounts.items():
        by_transport[transport][peer] = amount
    slow = [
        found
        for transport, peers in by_transport.items()
        for peer in peers
        if (found := _judged(peer, transport, peers)) is not None
    ]
    return sorted(slow, key=lambda peer: (-peer.times, -peer.late_reads, peer.node_id))


class _Amount(NamedTuple):
    pages: float = 0
    bytes: float = 0
    seconds: float = 0
    late: float = 0

    @property
    def is_enough(self) -> bool:
        """Whether it says how long reads take."""
        return self.pages >= _FEW_PAGES and self.bytes > 0 and self.seconds > 0


_FIGURES = {
    "p2pkv_peer_read_pages_total": "pages",
    "p2pkv_peer_read_bytes_total": "bytes",
    "p2pkv_peer_read_seconds_total": "seconds",
    "p2pkv_peer_late_reads_total": "late",
}
_SERIES = re.compile(r'(\w+)\{peer="(.*)",transport="(\w+)"\}')


def _amounts(now: Counters, before: Counters) -> dict[tuple[str, str], _Amount]:
    """Add up what all nodes read from each peer over each transport."""
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, counters in now.items():
        earlier = before.get(node, {})
        for series, value in counters.items():
            found = _SERIES.fullmatch(series)
            if found is not None and found[1] in _FIGURES and found[2] != "others":
                grown = value - earlier.get(series, 0.0)
                # a node that was restarted counts from nothing
                sums[found[2], found[3]][_FIGURES[found[1]]] += grown if grown >= 0 else value
    return {peer: _Amount(**figures) for peer, figures in sums.items()}


def _judged(peer: str, transport: str, peers: Mapping[str, _Amount]) -> SlowPeer | None:
    own = peers[peer]
    others = [amount for name, amount in peers.items() if name != peer and amount.is_enough]
    times = 0.0
    if others and own.is_enough:
        times = min(
            own.seconds / own.bytes / median([amount.seconds / amount.bytes for amount in others]),
            own.seconds / own.pages / median([amount.seconds / amount.pages for amount in others]),
        )
    is_late = own.late > 0 and own.late >= _LATE * own.pages / _FEW_PAGES
    if times < _SLOW and not is_late:
        return None
    seconds_a_gib = own.seconds / own.bytes * 2**30 if own.bytes else 0.0
    return SlowPeer(peer, transport, times if times >= _SLOW else 0.0, own.late, seconds_a_gib)


def lines(pages: Iterable[HotPage], peers: Iterable[SlowPeer]) -> Iterator[Text]:
    """Yield what is said below a table of nodes; nothing where there is nothing to say."""
    hot = list(pages)[:SHOWN]
    if hot:
        yield Text("hot pages (p2pkv explain --id ID says where one is):")
    for page in hot:
        who = ", ".join(page.nodes[:3]) + (f" and {len(page.nodes) - 3} more" if len(page.nodes) > 3 else "")
        yield Text(f"  {page.id}  {page.rate:,.1f} fetches/s by {who}")
    for peer in list(peers)[:SHOWN]:
        said = []
        if peer.times:
            said.append(f"reads take {peer.times:.1f} times as long as from others over {peer.transport}")
        if peer.late_reads:
            said.append(
                f"{peer.late_reads:,.0f} reads over {peer.transport} were late and left for other holders"
            )
        yield Text(f"slow peer {peer.node_id}: {'; '.join(said)}", style="yellow")
