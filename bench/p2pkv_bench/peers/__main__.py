"""Fetch the same pages through every system that works here, in turns, and say why the others don't."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.text import Text

from p2pkv_bench import machine, references, report
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move, Pages, Pair
from p2pkv_bench.peer import Meeting, Peer
from p2pkv_bench.peers import base
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Call, Contestant, take_turns, timed
from p2pkv_bench.rows import KIB, MIB, Row, make_row
from p2pkv_bench.working_set import working_set_nbytes

_SYSTEMS = {
    "nixl": "nixl",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "peercache": "peercache",
}
"""Module here, and the package it needs."""
_PAGES = (64 * KIB, 256 * KIB, MIB)
_BATCHES = (32, 128)


def main() -> int:
    """Run the comparison; 1 if none of the other systems works here."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 190)
    progress = Console(stderr=True, highlight=False)
    plan = Plan(
        working_set=working_set_nbytes(), round_nbytes=64 * MIB, tell=lambda what: progress.print(Text(what))
    )
    rows: list[Row] = []
    with ExitStack() as undo:
        pairs = {
            name: undo.enter_context(Pair(undo.enter_context(Meeting()), name, plan.working_set))
            for name in ("shm", "tcp")
        }
        systems: dict[str, tuple[Peer, base.Reader]] = {}
        for name, package in _SYSTEMS.items():
            plan.tell(f"starting {name}")
            try:
                systems[f"{name} {version(package)}"] = _start(name, pairs["shm"], undo)
            except (ImportError, OSError, PackageNotFoundError, BenchError) as error:
                console.print(Text(f"{name} can't run here: {error}", style="yellow"))
        for page_nbytes in _PAGES:
            plan.tell(f"pages of {report.page_size(page_nbytes)}")
            rows += _rows(pairs, systems, plan, page_nbytes)
    report.show(console, rows, machine.describe(), plan.working_set)
    sys.stdout.flush()
    # their threads and their order of destruction are not ours to wait for
    os._exit(0 if systems else 1)


def _start(name: str, pair: Pair, undo: ExitStack) -> tuple[Peer, base.Reader]:
    reader: base.Reader = import_module(f"p2pkv_bench.peers.{name}").Reader(pair.destination)
    owner = undo.enter_context(Peer("p2pkv_bench.peers.worker"))
    owner.call("start", system=name, working_set=pair.source.array.nbytes)
    return owner, reader


def _rows(
    pairs: dict[str, Pair], systems: dict[str, tuple[Peer, base.Reader]], plan: Plan, page_nbytes: int
) -> list[Row]:
    pages = {name: Pages(pair, page_nbytes) for name, pair in pairs.items()}
    own = pages["shm"]
    working: dict[str, base.Reader] = {}
    for name, (owner, reader) in systems.items():
        try:
            reader.meet(page_nbytes, owner.call("publish", page_nbytes=page_nbytes, n_pages=own.n_pages))
            _round(plan, own, min(_BATCHES), partial(_theirs, reader))
        except BenchError as error:
            plan.tell(f"{name} fails with pages of {report.page_size(page_nbytes)}: {error}")
        else:
            working[name] = reader
    rows = []
    for batch in _BATCHES:
        contestants: dict[str, Contestant] = {}
        for name, pair in pairs.items():
            contestants[f"p2pkv {name}"] = partial(_round, plan, pages[name], batch, partial(_ours, pair))
        for name, reader in working.items():
            contestants[name] = partial(_round, plan, own, batch, partial(_theirs, reader))
        contestants[references.MEMCPY] = partial(_round, plan, own, batch, partial(_copies, pairs["shm"]))
        figures = take_turns(contestants, plan.rounds)
        for name in pairs:
            ours = {f"p2pkv {name}": figures[f"p2pkv {name}"]}
            others = {other: values for other, values in figures.items() if not other.startswith("p2pkv")}
            rows.append(
                make_row(
                    ours | others,
                    suite="peers",
                    case="fetch, look-up cached",
                    unit="GB/s",
                    transport=name,
                    page_nbytes=page_nbytes,
                    batch=batch,
                )
            )
    return rows


def _ours(pair: Pair, moves: list[Move]) -> list[Call]:
    def fetch(move: Move) -> None:
        if not pair.node.fetch(move.keys, move.rows).all():
            raise BenchError("pages that are there were not fetched")

    for move in moves:
        pair.node.exists(move.keys)
    return [partial(fetch, move) for move in moves]


def _theirs(reader: base.Reader, moves: list[Move]) -> list[Call]:
    reader.prepare(moves)
    return [partial(reader.fetch, move) for move in moves]


def _copies(pair: Pair, moves: list[Move]) -> list[Call]:
    return references.copies(pair, [moves], is_chosen=False)[0]


def _round(plan: Plan, pages: Pages, batch: int, prepare: Callable[[list[Move]], list[Call]]) -> float:
    moves = pages.next_moves(plan.n_calls(pages.nbytes, batch, 1), batch)
    seconds = timed([prepare(moves)])
    pages.verify(moves)
    return len(moves) * batch * pages.nbytes / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
