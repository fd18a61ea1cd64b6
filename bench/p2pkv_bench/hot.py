"""One owner whose pages several nodes read all the time, with and without a share of their pools for hot pages.

Each of the two is a cluster of its own, of one owner and four readers in processes of their own, and they take turns.
That the share costs nothing where no page is hot, pages that are read once in a while show beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from p2pkv_bench.errors import BenchError
from p2pkv_bench.holding import Holding
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import percentile, take_turns
from p2pkv_bench.rows import KIB, MIB, Row, make_row

_READERS = 4
_OWNER = "owner"
_PAGE_NBYTES = 64 * KIB
_BATCH = 32
_HOT, _COLD = 128, 3584
"""Pages: a prompt that all begin with, and more than a sketch of hot pages has places for."""
_WORKING_SET = 256 * MIB
_READER_POOL = 64 * MIB
_SHARE = 0.5
_WARM_S = 4.0
"""So long it takes pages to become hot and to come: a look a second, and four finds."""


@dataclass
class _Figures:
    """Holds what the rounds of one cluster came to, a value a round."""

    read: list[float] = field(default_factory=list)  # GB/s of all readers
    from_owner: list[float] = field(default_factory=list)  # GB/s of them that came over the network
    owner_ms: list[float] = field(default_factory=list)  # of a processor, a second
    p99: list[float] = field(default_factory=list)  # us of a call


class _Crowd(Holding):
    """An owner and its readers."""

    def __init__(self, share: float, transport: str) -> None:
        with ExitStack() as undo:
            meeting = undo.enter_context(Meeting())
            common = {"transports": [transport], "buffer_size": 0}
            self._owner = undo.enter_context(Peer())
            config = meeting.settings(_OWNER, pool_size=_WORKING_SET * 5 // 4, **common)
            self._owner.call("start", config=config, working_set=_WORKING_SET)
            self._readers = [undo.enter_context(Peer()) for _ in range(_READERS)]
            for number, reader in enumerate(self._readers):
                config = meeting.settings(
                    f"reader-{number}", pool_size=_READER_POOL, hot_share=share, **common
                )
                reader.send("start", config=config, working_set=_WORKING_SET)
            for reader in self._readers:
                reader.answer()
            for peer in (self._owner, *self._readers):
                peer.call("wait_for", n_members=1 + _READERS)
            self._undo = undo.pop_all()

    def prepare(self, prefix: str, n_pages: int) -> None:
        n_published = self._owner.call(
            "publish", page_nbytes=_PAGE_NBYTES, prefix=prefix, shard=_OWNER, n_pages=n_pages
        )
        if n_published != n_pages:
            raise BenchError(f"{n_published} of {n_pages} pages were published")
        for reader in self._readers:
            reader.call(
                "prepare_reads", page_nbytes=_PAGE_NBYTES, prefix=prefix, shard=_OWNER, n_pages=n_pages
            )

    def read(self, seconds: float, figures: _Figures | None = None) -> float:
        """Have all readers read for so long; return the GB a second of all together."""
        before = self._owner.call("processor_seconds")
        for reader in self._readers:
            reader.send("read_for", seconds=seconds, batch=_BATCH)
        answers = [reader.answer() for reader in self._readers]
        spent = self._owner.call("processor_seconds") - before
        gb: float = sum(answer["nbytes"] for answer in answers) / 1e9 / seconds
        if figures is not None:
            figures.read.append(gb)
            figures.from_owner.append(sum(a["from_others"] for a in answers) / 1e9 / seconds)
            figures.owner_ms.append(spent * 1e3 / seconds)
            figures.p99.append(percentile([call for a in answers for call in a["calls"]], 99) * 1e6)
        return gb


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure pages that are all hot, and pages of which none is, over each transport."""
    for transport in plan.transports:
        for case, n_pages in (("hot", _HOT), ("cold", _COLD)):
            plan.tell(f"hot: {n_pages} pages of one owner over {transport}, {_READERS} readers")
            with _Crowd(_SHARE, transport) as with_share, _Crowd(0.0, transport) as without:
                figures = {"hot_share": _Figures(), "none": _Figures()}
                crowds = {"hot_share": with_share, "none": without}
                for crowd in crowds.values():
                    crowd.prepare(case, n_pages)
                    crowd.read(_WARM_S)
                take_turns(
                    {
                        name: partial(crowd.read, plan.load_seconds, figures[name])
                        for name, crowd in crowds.items()
                    },
                    plan.rounds,
                )
            yield from _rows(f"{_READERS} readers of {n_pages} {case} pages", transport, figures)


def _rows(case: str, transport: str, figures: dict[str, _Figures]) -> Iterator[Row]:
    for name, unit in (("read", "GB/s"), ("from_owner", "GB/s"), ("owner_ms", "ms/s"), ("p99", "us")):
        what = {
            "read": "read by all",
            "from_owner": "read from others",
            "owner_ms": "the owner's processor time",
            "p99": f"a call of {_BATCH}, p99",
        }[name]
        # the first round of each warms up, as in all suites
        values = {who: getattr(of, name)[1:] for who, of in figures.items()}
        yield make_row(
            values,
            suite="hot",
            case=f"{case}: {what}",
            unit=unit,
            transport=transport,
            page_nbytes=_PAGE_NBYTES,
            batch=_BATCH,
            threads=_READERS,
        )
