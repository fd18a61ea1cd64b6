"""The comparison with other systems: what is asked of whom, and what is said of those that fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

import p2pkv_bench.peers
from p2pkv_bench.errors import BenchError
from p2pkv_bench.pair import Move
from p2pkv_bench.peers import base, entrants, filling, moving, report
from p2pkv_bench.peers.alone import ROOM, START
from p2pkv_bench.peers.systems import NIXL_CMA, OWN, SYSTEMS, System
from p2pkv_bench.rows import KIB, MIB, Row, Target, make_row

PAGE = 4096


@pytest.mark.parametrize("system", [*OWN, *SYSTEMS], ids=lambda system: system.name)
def test_a_systems_module_has_what_it_is_said_to(system: System) -> None:
    (folder,) = p2pkv_bench.peers.__path__
    tree = ast.parse(Path(folder, f"{system.module}.py").read_text())
    has = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert has >= ({"Owner", "Reader"} if system.moves_pages else set())
    assert ("Pool" if system.has_pool else "Registered") in has


def test_nixl_takes_part_over_cma_with_and_without_its_thread_and_over_tcp() -> None:
    nixl = {
        (str(system.options["tls"]), system.options["progress_thread"])
        for system in SYSTEMS
        if system.module == "nixl"
    }
    assert nixl == {("posix,cma,self", False), ("posix,cma,self", True), ("tcp,self", True)}
    assert all(
        system.spins == system.options["progress_thread"] for system in SYSTEMS if system.module == "nixl"
    )


def test_shm_is_judged_beside_one_copy_by_the_kernel_with_one_thread() -> None:
    cases = [(size, batch, n) for size in (64 * KIB, 256 * KIB, MIB) for batch in (32, 128) for n in (1, 4)]
    judged = [case for case in cases if moving.target("shm", *case)]
    assert judged == [(64 * KIB, 32, 1), (MIB, 32, 1)]
    assert moving.target("shm", MIB, 32, 1) == Target(1.2, NIXL_CMA)
    assert not any(moving.target("tcp", *case) for case in cases)


class _Shelf(base.Pool):
    """Keeps the last so many pages, and may bring the last one with another byte."""

    def __init__(self, room: int, *, is_wrong: bool = False) -> None:
        super().__init__({})
        self._room = room
        self._is_wrong = is_wrong
        self._pages: dict[str, bytes] = {}

    def start(self, nbytes: int) -> None:
        pass

    def use(self, memory: NDArray[np.uint8]) -> None:
        self._rows = memory

    def put(self, keys: Sequence[str]) -> None:
        for key, row in zip(keys, self._rows, strict=False):
            self._pages[key] = row.tobytes()
        for key in list(self._pages)[: -self._room]:
            del self._pages[key]

    def get(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        for key, row in zip(keys, self._rows, strict=False):
            row[:] = np.frombuffer(self._pages.get(key, bytes(PAGE)), np.uint8)
        if self._is_wrong and keys[-1] in self._pages:
            self._rows[len(keys) - 1, 17] ^= 1
        return np.array([key in self._pages for key in keys])

    def close(self) -> None:
        pass


def test_only_pages_that_are_really_there_count_as_kept() -> None:
    assert filling.n_kept(_Shelf(60), 64 * PAGE, PAGE) == 60
    assert filling.n_kept(_Shelf(1000), 64 * PAGE, PAGE) == 96  # all that was stored


def test_a_page_brought_with_wrong_bytes_is_told() -> None:
    with pytest.raises(BenchError, match="brought with wrong bytes"):
        filling.n_kept(_Shelf(60, is_wrong=True), 64 * PAGE, PAGE)


def test_who_fails_has_no_more_rounds_and_says_why() -> None:
    rounds = iter([3.0])

    def one_round() -> float:
        for figure in rounds:
            return figure
        raise BenchError("wrong bytes in pages 0 to 31")

    guarded = entrants.Guarded(one_round)
    assert guarded() == 3.0
    assert guarded.error == ""
    assert (guarded(), guarded()) == (0.0, 0.0)
    assert guarded.error == "wrong bytes in pages 0 to 31"


class _Owner:
    """Stands in for the other process."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def call(self, command: str, **arguments: object) -> str:
        self.did.append(command)
        return "there"

    def resume(self) -> None:
        self.did.append("resume")

    def stop(self) -> None:
        self.did.append("stop")


class _Reader(base.Reader):
    def __init__(self, number: int, did: list[str]) -> None:
        self.number = number
        self.did = did

    def meet(self, page_nbytes: int, published: object) -> None:
        self.did.append(f"{self.number} meets {published}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.did.append(f"{self.number} begins")
        yield
        self.did.append(f"{self.number} ends")

    def prepare(self, moves: Sequence[Move]) -> None:
        self.did.append(f"{self.number} prepares {len(moves)}")

    def fetch(self, move: Move) -> None:
        self.did.append(f"{self.number} fetches {move}")

    def close(self) -> None:
        pass


def test_each_thread_has_a_reader_and_an_owner_that_spins_runs_in_its_turn_only() -> None:
    owner = _Owner()
    readers = [_Reader(number, owner.did) for number in range(3)]
    system = System(name="spinner", module="nixl", package="nixl", spins=True)
    entrant = entrants.Entrant(system, owner, readers)  # type: ignore[arg-type]  # does all that it is asked
    assert entrant.most_threads == 3
    entrant.publish(PAGE, 8)
    assert owner.did == ["resume", "publish", *(f"{n} meets there" for n in range(3)), "stop"]
    owner.did.clear()
    with entrant.turn([["a"], ["b"]]) as threads:  # type: ignore[list-item]  # moves are only passed on
        for calls in threads:
            for call in calls:
                call()
    assert owner.did == [
        *("resume", "0 begins", "0 prepares 1", "1 begins", "1 prepares 1"),
        *("0 fetches a", "1 fetches b", "1 ends", "0 ends", "stop"),
    ]


def test_a_system_that_has_too_few_readers_says_so() -> None:
    said: list[str] = []

    def make(destination: object, options: object, number: int) -> base.Reader:
        if number == 2:
            raise BenchError("no more than two")
        return _Reader(number, [])

    make_reader: Callable[..., base.Reader] = make
    readers = entrants._readers(make_reader, SYSTEMS[0], None, 4, said.append)  # type: ignore[arg-type]
    assert len(readers) == 2
    assert said == [f"{NIXL_CMA} reads with 2 threads at most: no more than two."]


def test_a_system_that_is_not_installed_is_left_out_and_named() -> None:
    said: list[str] = []
    absent = System(name="Absent", module="no_such_module", package="no-such-package")
    with ExitStack() as undo:
        found = entrants.entrants([absent], None, 1, undo, said.append)  # type: ignore[arg-type]  # not reached
    assert found == []
    assert len(said) == 1
    assert said[0].startswith("Absent is left out: ")


def _rows() -> list[Row]:
    moved = {"p2pkv": [12.0], NIXL_CMA: [4.0], "memcpy": [11.0]}
    shape = {"page_nbytes": 64 * KIB, "batch": 32}
    return [
        make_row(
            moved,
            suite="peers",
            case=moving.CASE,
            unit="GB/s",
            transport="shm",
            target=moving.target("shm", 64 * KIB, 32, 1),
            **shape,
        ),
        make_row(
            {**moved, "p2pkv": [2.0]}, suite="peers", case=moving.CASE, unit="GB/s", transport="tcp", **shape
        ),
        make_row(
            {"p2pkv": [0.99], "PeerCache": [0.5]},
            suite="peers",
            case=ROOM,
            unit="",
            page_nbytes=int(4.5 * MIB),
            target=Target(0.97),
        ),
        make_row({"p2pkv": [300.0], "populate": [290.0]}, suite="peers", case=START, unit="ms"),
    ]


def test_the_tables_show_every_system_and_what_was_left_out() -> None:
    console = Console(width=190)
    with console.capture() as capture:
        report.show(console, _rows(), {"cpu": "x"}, 512 * MIB, ["Mooncake TE is left out: no libibverbs."])
    text = capture.get()
    line = next(line for line in text.splitlines() if line.startswith("64 KiB"))
    assert [cell.strip() for cell in line.split("│")] == ["64 KiB", "32", "12", "2", "4", "11"]
    assert "3.00 [3.00..3.00]" in text
    assert "fetch over shm, 32 x 64 KiB: 3 of NIXL cma, at least 1.2 is wanted: met" in text
    assert f"{ROOM}, 4.5 MiB: 0.99, at least 0.97 is wanted: met" in text
    assert "pages" not in text[text.index(f"milliseconds to {START}") :]
    assert "Mooncake TE is left out: no libibverbs." in text
