"""An attached engine knows the members rightly while several of its threads ask for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from p2pkv.attach import following as following_module
from p2pkv.attach.following import SILENT_S, Following
from p2pkv.attach.unsettled import Unsettled
from p2pkv.control.sockets import Request
from p2pkv.control.wire import PROBE_REPLY, Kind, Reply, ReplyStatus
from p2pkv.directory.view import DEFAULT_CLUSTER, Member, View, encode

MOMENT_S = 0.2
"""In which a thread that nothing keeps from it takes a view."""


class HostsNode:
    """Answers for the host's node, which knows these members."""

    def __init__(self, *node_ids: str) -> None:
        self.knows(*node_ids)

    def knows(self, *node_ids: str) -> None:
        self.view = View(Member(node_id, 1, f"{node_id}:1") for node_id in node_ids)

    def ask(self, request: Request, timeout: float) -> Reply:
        """Answer a probe or an exchange; stands in for that of a ``ControlClient``."""
        if request.kind is Kind.PROBE:
            return Reply(ReplyStatus.OK, 1, 0, PROBE_REPLY.pack(1, self.view.digest))
        return Reply(ReplyStatus.OK, 1, 0, encode("host", self.view.values()))


def test_no_other_view_is_taken_while_one_is_confirmed() -> None:
    """Who confirms a view may replace what is routed by, and must not undo what a bump's look has taken."""
    node, told = HostsNode("host"), list[str]()
    bumps: list[threading.Thread] = []

    def confirm() -> None:
        for bump in bumps:
            bump.start()
            bump.join(MOMENT_S)
            told.append("confirmed")

    following = Following(
        node,  # type: ignore[arg-type]
        lambda _, new: told.append(f"{len(new)} members"),
        confirm,
        lambda _: None,
        Unsettled(),
        cluster=DEFAULT_CLUSTER,
    )
    following.look("host:1", 1.0)

    def look_again() -> None:
        bumps.clear()
        following.look_again(float("inf"))

    bump = threading.Thread(target=look_again)
    bumps.append(bump)

    def probed(request: Request, timeout: float) -> Reply:
        """Answer, and know of a newcomer from then on."""
        reply = HostsNode.ask(node, request, timeout)
        node.knows("host", "newcomer")
        return reply

    node.ask = probed  # type: ignore[method-assign]
    following._turn()
    bump.join()
    assert told == ["1 members", "confirmed", "2 members"]


def test_a_view_is_shown_when_it_was_told_of() -> None:
    """Else a bump may ask in between who is a member and who was given up, and one that has just gone is neither."""
    node, shown = HostsNode("host", "other"), list[int]()
    following = Following(
        node,  # type: ignore[arg-type]
        lambda *_: shown.append(len(following.view)),
        lambda: None,
        lambda _: None,
        Unsettled(),
        cluster=DEFAULT_CLUSTER,
    )
    following.look("host:1", 1.0)
    node.knows("host")
    following.look_again(float("inf"))
    assert (shown, len(following.view)) == ([0, 2], 1)


def test_a_view_that_could_not_be_told_of_is_told_again() -> None:
    node, told = HostsNode("host"), list[int]()

    def tell(_: View, new: View) -> None:
        told.append(len(new))
        if len(told) == 1:
            raise OSError("no descriptor left")

    following = Following(
        node,  # type: ignore[arg-type]
        tell,
        lambda: None,
        lambda _: None,
        Unsettled(),
        cluster=DEFAULT_CLUSTER,
    )
    with pytest.raises(OSError, match="no descriptor"):
        following.look("host:1", 1.0)
    following._turn()
    assert told == [1, 1]


def test_who_stands_still_between_two_looks_does_not_find_its_node_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node, times = HostsNode("host"), [100.0]
    monkeypatch.setattr(following_module, "time", SimpleNamespace(monotonic=lambda: times[0]))
    monkeypatch.setattr(following_module, "tell_why_silent", lambda address, tell: tell("it hangs"))
    following = Following(
        node,  # type: ignore[arg-type]
        lambda *_: None,
        lambda: None,
        lambda _: None,
        Unsettled(),
        cluster=DEFAULT_CLUSTER,
    )
    following.is_attached = lambda: True
    following.look("host:1", 1.0)
    following._turn()
    times[0] += 600.0
    assert not following.is_silent
    node.ask = lambda request, timeout: None  # type: ignore[method-assign]
    for seconds, is_silent in ((0.0, False), (SILENT_S, False), (1.0, True)):
        times[0] += seconds
        following._turn()
        assert following.is_silent == is_silent
    assert "it hangs" in caplog.text
    del node.ask
    following._turn()
    assert not following.is_silent
