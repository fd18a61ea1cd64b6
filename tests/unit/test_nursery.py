"""A process that a nursery forks is as good as one that is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.testing.nursery import Nursery
from p2pkv.testing.processes import ChildEndedError, ChildProcess

PROGRAM = """
import os, sys
from p2pkv.testing.nursery import Nursery
from p2pkv.testing.processes import obey

class Worker:
    def parent(self): return os.getppid()
    def variable(self, name): return os.environ.get(name)
    def arguments(self): return sys.argv
    def end(self, status): sys.exit(status)
    def shout(self): print("so it is", file=sys.stderr); sys.exit(3)

def main(): obey(Worker())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def nursery(program: Path) -> Iterator[Nursery]:
    nursery = Nursery(str(program))
    yield nursery
    nursery.close()


def born(nursery: Nursery, program: Path, **environ: str) -> ChildProcess:
    return ChildProcess(
        [sys.executable, str(program)], name="child", environ=os.environ | environ, popen=nursery.popen
    )


def test_its_children_are_the_askers_and_live_in_the_askers_environment(
    nursery: Nursery, program: Path
) -> None:
    for value in ("one", "two"):
        with born(nursery, program, CHILDHOOD=value) as child:
            child.send("parent")
            assert child.answer(60.0) == os.getpid()
            child.send("variable", name="CHILDHOOD")
            assert child.answer(60.0) == value
            child.send("arguments")
            assert child.answer(60.0) == [str(program)]


def test_how_a_child_ended_is_known(nursery: Nursery, program: Path) -> None:
    with born(nursery, program) as child:
        child.send("end", status=7)
        with pytest.raises(ChildEndedError, match="exit status 7"):
            child.answer(60.0)
    with born(nursery, program) as child:
        child.kill()
        with pytest.raises(ChildEndedError, match=f"exit status -{signal.SIGKILL:d}"):
            child.answer(60.0)


def test_what_a_child_says_before_its_end_is_kept(nursery: Nursery, program: Path) -> None:
    words = [sys.executable, str(program)]
    with ChildProcess(words, name="child", keeps_errors=True, popen=nursery.popen) as child:
        child.send("shout")
        with pytest.raises(ChildEndedError, match=r"(?s)exit status 3.*so it is"):
            child.answer(60.0)


def test_its_program_is_found_on_the_path_that_is_given(program: Path) -> None:
    nursery = Nursery("program", [str(program.parent)])
    words = [sys.executable, "-m", "program"]
    with ChildProcess(words, name="child", popen=nursery.popen) as child:
        child.send("parent")
        assert child.answer(60.0) == os.getpid()
    nursery.close()


def test_its_children_outlive_it_and_end_with_their_stdin(nursery: Nursery, program: Path) -> None:
    child = born(nursery, program)
    nursery.close()
    child.send("parent")
    assert child.answer(60.0) == os.getpid()
    child.close(patience=60.0)
    with pytest.raises(ChildEndedError, match="exit status 0"):
        child.answer(60.0)


def test_nobody_becomes_an_orphans_parent_for_good(nursery: Nursery, program: Path) -> None:
    born(nursery, program).close()
    orphan = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(orphan.stdout)
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        assert int(parent) != os.getpid()
    finally:
        os.kill(pid, signal.SIGKILL)
