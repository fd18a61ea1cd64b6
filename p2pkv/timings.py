"""How long things take: every histogram p2pkv has, declared once.

Native code adds to most of them, a batch at a time, and nobody takes a lock. All series are there from the start, so
that an alert sees the first event. A page of metrics has a thousand of their lines; so their text is made natively,
from names that are joined once, while other threads have the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

from p2pkv import _native
from p2pkv.exemplars import Exemplars

_BOUNDS = (*map(repr, _native.Timings.bounds()), "+Inf")
"""As Prometheus' own client writes such numbers, whose import would take a tenth of a node's start."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Classes of batches, by what makes one large."""

    bounds: tuple[int, ...]
    names: tuple[str, ...]


OF_BYTES = Sizes(
    (1 << 16, 1 << 20, 1 << 24), ("up to 64 KiB", "64 KiB to 1 MiB", "1 to 16 MiB", "above 16 MiB")
)
OF_PAGES = Sizes(
    (16, 128, 1024), ("up to 16 pages", "17 to 128 pages", "129 to 1024 pages", "above 1024 pages")
)

FARTHEST = ("nowhere", "own_pool", "peers", "disk", "peers_disk")
"""From how far the pages of a fetch came that came from farthest, in the order of ``FetchBatch::Farthest``."""


@dataclass(slots=True)
class Timing:
    """One histogram, by ``label`` (none if that is empty) and by size class."""

    name: str
    help: str
    sizes: Sizes
    label: str = ""
    values: Sequence[str] = ("",)
    native: _native.Timings = field(init=False)
    exemplars: Exemplars = field(init=False)
    _series: list[str] = field(init=False)
    _text: _native.TimingsText = field(init=False)

    def __post_init__(self) -> None:
        self.native = _native.Timings(len(self.values), list(self.sizes.bounds))
        self.exemplars = Exemplars(self.native)
        self._series = [
            (f'{self.label}="{_escaped(value)}",' if self.label else "") + f'size_class="{size}"'
            for value, size in product(self.values, self.sizes.names)
        ]

        name, starts = self.name, list[str]()
        for series in self._series:
            starts += [f'{name}_bucket{{{series},le="{bound}"}} ' for bound in _BOUNDS]
            starts += [f"{name}_count{{{series}}} ", f"{name}_sum{{{series}}} "]
        self._text = _native.TimingsText(f"# HELP {name} {self.help}\n# TYPE {name} histogram\n", starts)

    def text(self, *, with_exemplars: bool = False) -> bytes:
        """Return the lines of this histogram as both text formats have them; only OpenMetrics has exemplars."""
        known = self.exemplars.all() if with_exemplars else ()
        notes = [(series * _native.TimingsText.LINES + bucket, text) for series, bucket, text in known]
        return self._text.write(self.native, notes)

    def counters(self) -> Iterator[tuple[str, float]]:
        """Yield names and values of the series that have seen something: few have, and they go over the wire."""
        for series, (counts, seconds) in zip(self._series, self.native.read(), strict=True):
            total = sum(counts)
            if not total:
                continue
            for bound, n in zip(_BOUNDS, accumulate(counts), strict=True):
                yield f'{self.name}_bucket{{{series},le="{bound}"}}', n
            yield f"{self.name}_count{{{series}}}", total
            yield f"{self.name}_sum{{{series}}}", seconds


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Timings:
    """The histograms of one node. Thread-safe."""

    def __init__(self) -> None:
        self.fetches = Timing(
            "p2pkv_fetch_seconds",
            "How long fetches took, by where the pages came from that came from farthest",
            OF_BYTES,
            "farthest",
            FARTHEST,
        )
        self.publishes = Timing(
            "p2pkv_publish_seconds", "How long publishes took, by the bytes that were copied", OF_BYTES
        )
        self.exists = Timing("p2pkv_exists_seconds", "How long calls of exists took", OF_PAGES)
        self.look_ups = Timing("p2pkv_look_up_seconds", "How long peers' shards were asked for", OF_PAGES)
        self.reads = self._reads(())

    def by_source(self, sources: Sequence[str]) -> Timing:
        """Have reads counted by these sources: the own pool, the disk, and the transports by number."""
        self.reads = self._reads(sources)
        return self.reads

    def _reads(self, sources: Sequence[str]) -> Timing:
        return Timing(
            "p2pkv_read_seconds",
            "How long bytes of one fetch took from one source: of all of its pages there, or of one peer's",
            OF_BYTES,
            "source",
            sources,
        )

    def watch(self, call: str) -> Callable[[Mapping[str, str]], None] | None:
        """Begin to watch one call of ``publish``, ``fetch`` or ``exists``, for :class:`Exemplars`; None for others."""
        timing = {"publish": self.publishes, "fetch": self.fetches, "exists": self.exists}.get(call)
        return None if timing is None else timing.exemplars.watch()

    def all(self) -> tuple[Timing, ...]:
        """Return them in the order in which they are shown."""
        return (self.fetches, self.reads, self.publishes, self.exists, self.look_ups)
