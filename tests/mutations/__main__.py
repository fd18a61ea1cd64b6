"""Plant every bug in turn and demand that its hunter finds it; end with a table.

A hunter that fails without the bug as well has proven nothing, so each runs once on the tree as it is first
(``--trust`` leaves that out).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mutations.planted import Planted, planted
from mutations.tree import ROOT, Tree

_SLOWNESS = 3.0
"""How much slower than the machine that the patches' times were taken on another one may be."""
_LEFT_OUT = "left out"
_DID_NOT_BUILD = 3
"""The exit status of ``native/test/run.py`` that no test has failed for."""
_STARTING_S = 300.0
"""What building native tests, importing and collecting may take before the hunt itself begins."""


@dataclass(frozen=True)
class Outcome:
    """What became of one planted bug."""

    bug: Planted
    verdict: str
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        return self.verdict == "found" or self.verdict.startswith(_LEFT_OUT)


def missing(bug: Planted) -> str | None:
    """Return why the bug's hunter can't run here, None if it can."""
    if bug.hunter[0] == "chaos" and (os.geteuid() != 0 or shutil.which("ip") is None):
        return "needs root and what `tools/system-packages PYTHON chaos` installs"
    if bug.hunter[0] == "chaos" and "hosts" in bug.hunter and shutil.which("etcd") is None:
        return "needs what `tools/system-packages PYTHON etcd` installs"
    if bug.hunter[0] != "rdma" or (os.geteuid() == 0 and shutil.which("qemu-system-x86_64")):
        return None
    return "needs root and what `tools/system-packages PYTHON rdma` installs"


def command_of(tree: Tree, bug: Planted, seconds: float) -> list[str]:
    """Return what runs the bug's hunter for at most ``seconds``."""
    kind, *arguments = bug.hunter
    if kind == "hunt":
        return [
            "-m",
            "hunts",
            "--hunt",
            arguments[0],
            "--seconds",
            str(seconds),
            "--from-seed",
            "1",
            "--jobs",
            "1",
        ]
    if kind == "pytest":
        return ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    if kind == "native":
        return ["native/test/run.py", *arguments]
    if kind == "rdma":
        vm = ["tests/rdma_vm/vm.py", "--timeout", f"{seconds + _STARTING_S:g}", str(tree.python)]
        return [*vm, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "rdma_slow", *arguments]
    return ["-m", "chaos", "--seed", arguments[0], "--seconds", arguments[1], *arguments[2:]]


def try_bug(tree: Tree, bug: Planted) -> Outcome:
    """Plant it, run its hunter, take it out again."""
    tree.plant(bug)
    started = time.monotonic()
    limit = bug.within * _SLOWNESS
    try:
        done = tree.run(command_of(tree, bug, limit), seconds=limit + _STARTING_S)
        verdict = "found" if done.returncode else "NOT FOUND"
        if done.returncode and bug.hunter[0] in ("pytest", "rdma") and done.returncode != 1:
            # only 1 means that tests failed; others that there was none, or that nothing could be imported
            verdict = "NOT RUN"
        if bug.hunter[0] == "native" and done.returncode == _DID_NOT_BUILD:
            verdict = "DID NOT BUILD"
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        verdict, output = "TOO LATE", str(late.stdout or "")
    finally:
        tree.mend(bug)
    return Outcome(bug, verdict, time.monotonic() - started, output)


def is_quiet(tree: Tree, bug: Planted) -> Outcome | None:
    """Run the hunter where nothing is planted; return None if it finds nothing."""
    tree.build_for(bug)
    seconds = min(bug.within, 5.0)
    try:
        done = tree.run(command_of(tree, bug, seconds), seconds=bug.within * _SLOWNESS + _STARTING_S)
    except subprocess.TimeoutExpired as late:
        return Outcome(bug, "HUNTER HANGS WITHOUT IT", 0.0, str(late.stdout or ""))
    return Outcome(bug, "HUNTER FAILS WITHOUT IT", 0.0, done.stdout) if done.returncode else None


def main() -> int:
    """Parse the command line, try the bugs, report; non-zero unless every one was found."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs to plant (default: all)")
    parser.add_argument("--trust", action="store_true", help="don't run the hunters without the bugs first")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutations", help="where the copy lies")
    arguments = parser.parse_args()
    bugs = planted()
    unknown = sorted(set(arguments.names) - {bug.name for bug in bugs})
    if unknown:
        parser.error(f"no bug is called {unknown[0]!r}; there are {', '.join(bug.name for bug in bugs)}")
    chosen = [bug for bug in bugs if not arguments.names or bug.name in arguments.names]
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    tree = Tree(arguments.folder)
    console.print("copying and building the tree ...")
    tree.refresh()
    outcomes = _try_all(tree, chosen, console, trusting=arguments.trust)
    console.print(_table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _try_all(tree: Tree, bugs: list[Planted], console: Console, *, trusting: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    quiet: dict[tuple[str, ...], Outcome | None] = {}
    for bug in bugs:
        if why := missing(bug):
            outcomes.append(Outcome(bug, f"{_LEFT_OUT}: {why}", 0.0, ""))
            continue
        if not trusting and bug.hunter not in quiet:
            quiet[bug.hunter] = is_quiet(tree, bug)
        try:
            outcome = quiet.get(bug.hunter) or try_bug(tree, bug)
        except (ValueError, RuntimeError) as error:
            outcome = Outcome(bug, "NOT PLANTED", 0.0, str(error))
        outcomes.append(outcome)
        console.print(f"{bug.name}: {outcome.verdict} after {outcome.seconds:.0f} s", markup=False)
        if not outcome.is_good:
            console.print(outcome.output[-6000:], markup=False)
    return outcomes


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="planted bugs")
    for column in ("bug", "what it breaks", "hunter", "allowed", "took", "verdict"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        bug = outcome.bug
        took = f"{outcome.seconds:.0f} s"
        table.add_row(bug.name, bug.bug, " ".join(bug.hunter), f"{bug.within:.0f} s", took, outcome.verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
