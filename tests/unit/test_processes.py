"""The harness of child processes: what is said of a child that ends, hangs or refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from p2pkv.testing.processes import ChildEndedError, ChildProcess, RefusedError

_CHILD = """
import sys
from collections.abc import Iterator
from p2pkv.errors import UsageError
from p2pkv.testing.processes import claim_stdout, obey

class Worker:
    def add(self, a, b):
        print("a library talks between the answers")
        return a + b
    def refuse(self):
        raise UsageError("not like this")
    def crash(self):
        raise ZeroDivisionError("the child's own mistake")

obey(Worker(), answers=claim_stdout())
"""
_ENOUGH_S = 60.0


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    with ChildProcess([sys.executable, "-c", _CHILD], name="adder", keeps_errors=True) as child:
        yield child


def call(child: ChildProcess, command: str, **arguments: object) -> object:
    child.send(command, **arguments)
    return child.answer(_ENOUGH_S)


def test_answers_come_in_order_whatever_else_is_printed(child: ChildProcess) -> None:
    for n in range(3):
        child.send("add", a=n, b=1)
    assert [child.answer(_ENOUGH_S) for _ in range(3)] == [1, 2, 3]


def test_an_error_of_p2pkv_is_an_answer(child: ChildProcess) -> None:
    with pytest.raises(RefusedError, match="UsageError: not like this") as refused:
        call(child, "refuse")
    assert refused.value.args == ("UsageError", "not like this")
    assert call(child, "add", a=1, b=1) == 2


def test_any_other_error_ends_the_child_and_is_quoted(child: ChildProcess) -> None:
    quoted = r"(?s)adder has ended \(exit status 1\); the end of its stderr:.*the child's own mistake"
    with pytest.raises(ChildEndedError, match=quoted):
        call(child, "crash")
    with pytest.raises(ChildEndedError, match=quoted):
        child.answer(_ENOUGH_S)
    with pytest.raises(ChildEndedError, match="adder is gone"):
        call(child, "add", a=1, b=1)


def test_a_stopped_child_is_late_and_answers_when_it_may(child: ChildProcess) -> None:
    call(child, "add", a=1, b=1)
    child.stop()
    child.send("add", a=1, b=2)
    with pytest.raises(TimeoutError, match=r"adder did not answer within 0\.05 s"):
        child.answer(0.05)
    child.resume()
    assert child.answer(_ENOUGH_S) == 3


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_is_gone_when_closed(child: ChildProcess, is_stopped: bool) -> None:
    if is_stopped:
        child.stop()
    child.close()
    child.close()
    with pytest.raises(ChildEndedError, match=r"adder is gone \(exit status"):
        child.send("add", a=1, b=1)


def test_a_child_that_may_finish_does(child: ChildProcess) -> None:
    child.send("add", a=1, b=1)
    child.close(_ENOUGH_S)
    assert child.answer(_ENOUGH_S) == 2
    with pytest.raises(ChildEndedError, match="exit status 0"):
        child.answer(_ENOUGH_S)
