"""Every way of copying that this CPU has, by the size of a copy, and whether the one that a node chose is the best.

The node measures them once, for 20 ms (docs/performance.md, Copies). Here the same measurement is made again for longer
in every round, each kernel in turn with the others, on memory that is in no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from p2pkv import _native
from p2pkv.memory import copies
from p2pkv_bench.peer import Meeting
from p2pkv_bench.plan import Plan
from p2pkv_bench.references import MEMCPY
from p2pkv_bench.rows import Row, Target, make_row

_ROUND_S = 0.2
_OPERATIONS = {"copy": "copy", "copy_and_sum": "copy and checksum"}
_LEAST_OF_BEST = 0.95
_BEST = "the fastest"

Figures = dict[tuple[str, str], dict[str, list[float]]]
"""GB/s in each round, by the kernel, by operation and size class."""


def rows(_meeting: Meeting, plan: Plan) -> Iterator[Row]:
    """Measure all kernels; the choice of this process's nodes is made first if none was."""
    plan.tell("copies")
    copies.choose(copies.AUTO, None)
    figures: Figures = {}
    for _ in range(plan.rounds):
        for operation, size_class, kernel, nbytes_per_second in _native.try_copy_kernels(_ROUND_S):
            kernels = figures.setdefault((operation, size_class), {})
            kernels.setdefault(kernel, []).append(nbytes_per_second / 1e9)
    yield from compare(figures, copies.choices())


def compare(figures: Figures, choices: Sequence[copies.CopyChoice]) -> Iterator[Row]:
    """Make a row for each choice beside the kernel that was fastest here, and below it one for each kernel."""
    for choice in choices:
        kernels = figures[choice.operation, choice.size_class]
        best = max(kernels, key=lambda kernel: median(kernels[kernel]))
        what = f"{_OPERATIONS[choice.operation]}, {choice.size_class}"
        yield _row(
            {
                f"the node's choice, {choice.kernel}": kernels[choice.kernel],
                MEMCPY: kernels[MEMCPY],
                _BEST: kernels[best],
            },
            f"{what}: the node chose {choice.kernel}",
            Target(_LEAST_OF_BEST, _BEST),
        )
        for kernel, values in kernels.items():
            if kernel != MEMCPY:
                yield _row(
                    {kernel: values, MEMCPY: kernels[MEMCPY], _BEST: kernels[best]}, f"  {kernel}", None
                )


def _row(figures: dict[str, list[float]], case: str, target: Target | None) -> Row:
    return make_row(figures, suite="copies", case=case, unit="GB/s", target=target)
