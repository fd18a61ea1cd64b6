"""The benchmark's rows, targets and options, without timing anything."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.memory import copies as node_copies
from p2pkv_bench import copies, plan, report, run, threads
from p2pkv_bench.options import names_of, numbers_of, sizes_of
from p2pkv_bench.plot import _share_of_target, draw
from p2pkv_bench.rounds import timed_together
from p2pkv_bench.rows import MIB, Row, Target, make_row


def test_every_suite_that_a_plan_names_is_one_that_runs() -> None:
    assert tuple(run._SUITES) == plan.SUITES
    assert set(plan.quick(plan.Plan()).suites) < set(plan.SUITES)


def test_several_threads_are_done_when_the_last_of_their_calls_is() -> None:
    done: list[str] = []
    names: set[str] = set()

    def call() -> None:
        names.add(threading.current_thread().name)
        done.append("")

    assert timed_together([[call] * 3, [call] * 2]) > 0
    assert len(done) == 5
    assert names == {"p2pkv-bench"}


def test_what_one_of_several_threads_raises_reaches_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        timed_together([[lambda: None], [lambda: 1 // 0]])


@pytest.mark.parametrize(("of_four", "is_met"), [(1.6, True), (1.4, False)])
def test_four_threads_are_judged_by_what_one_thread_does_and_shown_beside_memcpy(
    of_four: float, is_met: bool
) -> None:
    figures = {
        ("p2pkv", 4): [of_four] * 3,
        ("p2pkv", 1): [1.0] * 3,
        ("memcpy", 4): [9.0] * 3,
        ("memcpy", 1): [6.0] * 3,
    }
    ours, beside = threads.compare(figures, case="exists", unit="M/s", batch=128)
    assert (ours.subject, ours.threads, ours.batch, ours.judged, ours.is_met) == (
        *("p2pkv", 4, 128, of_four),
        is_met,
    )
    assert (beside.subject, beside.unit, beside.references[0].ratio.median) == ("memcpy", "GB/s", 1.5)
    assert beside.is_met is None


def _choices() -> list[node_copies.CopyChoice]:
    return [node_copies.CopyChoice("copy", "above 256 KiB", "avx2", 1.2)]


@pytest.mark.parametrize(("of_chosen", "is_met"), [(1.8, False), (1.95, True)])
def test_the_kernel_that_a_node_chose_is_judged_by_the_fastest_one(of_chosen: float, is_met: bool) -> None:
    kernels = {"memcpy": [1.0], "avx2": [of_chosen], "avx2_nt": [2.0]}
    chosen, *all_kernels = copies.compare({("copy", "above 256 KiB"): kernels}, _choices())
    assert "avx2" in chosen.case
    assert (chosen.judged, chosen.is_met) == (of_chosen / 2.0, is_met)
    assert [row.subject for row in all_kernels] == ["avx2", "avx2_nt"]
    assert [row.references[0].name for row in all_kernels] == ["memcpy"] * 2


def test_kernels_are_tried_in_every_class_that_a_node_chooses_for() -> None:
    trials = _native.try_copy_kernels(0.0)
    tried = {(operation, size_class) for operation, size_class, _, _ in trials}
    assert tried == {(choice.operation, choice.size_class) for choice in node_copies.choices()}
    assert {kernel for operation, _, kernel, _ in trials if operation == "copy"} == set(
        _native.copy_kernels()
    )
    assert all(nbytes_per_second > 0 for *_, nbytes_per_second in trials)


def _printed(rows: list[Row]) -> str:
    console = Console(width=190)
    with console.capture() as capture:
        report.show(console, rows, {"cpu": "x"}, 512 * MIB)
    return capture.get()


def test_a_table_says_what_its_figures_are_of() -> None:
    figures = {"p2pkv": [2.0], "memcpy": [1.0]}
    ours = make_row(figures, suite="fetch", case="a", unit="GB/s", target=Target(1.0, "memcpy"))
    assert "p2pkv" in _printed([ours])
    assert "1 of 1 targets met" in _printed([ours])
    mixed = _printed([ours, make_row({"avx2": [2.0]}, suite="fetch", case="b", unit="GB/s")])
    assert "measured" in mixed
    assert "p2pkv" not in mixed


def test_options_are_lists_and_what_is_not_known_is_refused() -> None:
    assert names_of("--only", "exists, fetch", plan.SUITES) == ("exists", "fetch")
    assert numbers_of("--threads", "1,4") == (1, 4)
    assert sizes_of("--pages", "64KiB,1MiB", 512 * MIB) == (65536, MIB)
    with pytest.raises(ConfigError, match=r"--only takes .*not 'fetsch'"):
        names_of("--only", "fetsch", plan.SUITES)
    with pytest.raises(ConfigError, match="--threads takes numbers from 1 to 4096, not '0'"):
        numbers_of("--threads", "0")
    with pytest.raises(ConfigError, match="--pages takes multiples of 64 bytes up to 67108864, not 100"):
        sizes_of("--pages", "100", 512 * MIB)


def test_a_picture_has_every_row_with_a_target_and_says_on_which_side_it_is(tmp_path: Path) -> None:
    ratio = make_row(
        {"p2pkv": [1.0, 1.2], "memcpy": [1.0, 1.0]},
        suite="fetch",
        case="cached",
        transport="shm",
        unit="GB/s",
        page_nbytes=MIB,
        batch=32,
        target=Target(1.0, "memcpy"),
    )
    scalar = make_row(
        {"p2pkv": [4.0]}, suite="scrape", case="text", unit="ms", target=Target(2.0, at_most=True)
    )
    assert _share_of_target(ratio) == pytest.approx(1.1)
    assert _share_of_target(scalar) == 0.5
    for rows in ([ratio, scalar], [scalar], []):
        written = draw(rows, tmp_path / "out", {"cpu": "some", "cores": 2, "load": 1.0})
        assert [path.stat().st_size > 0 for path in written] == [True, True]
    assert "scrape text" in _words(
        draw([ratio, scalar], tmp_path / "out", {"cpu": "some", "cores": 2, "load": 1.0})[1]
    )


def test_what_has_different_references_is_on_different_axes(tmp_path: Path) -> None:
    rows = [
        make_row(
            {"p2pkv": [1.0], reference: [1.0]},
            suite="fetch",
            case="cached",
            transport="shm",
            unit="GB/s",
            page_nbytes=MIB,
            batch=32,
        )
        for reference in ("memcpy", "raw stream")
    ]
    words = _words(draw(rows, tmp_path / "out", {"cpu": "some", "cores": 2, "load": 1.0})[1])
    assert "of memcpy" in words
    assert "of raw stream" in words


def _words(svg: Path) -> str:
    """Return what a picture says: letters are drawn, and their text is a comment beside them."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))
