"""Answers that come after their time are taken in, and what waits for them is bounded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from cluster import eventually
from p2pkv.control.patience import LateAnswer, PatientLines
from p2pkv.control.secret import ClusterKeys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import HEADER, MAGIC, PROBE_REPLY, REPLY, VERSION, Kind
from p2pkv.errors import ClosedError
from p2pkv.testing.ports import free_port

AT_ONCE_S = 0.05
"""What a call has that nobody answers."""


def new_keys(*accepted: ClusterKeys) -> ClusterKeys:
    public, private = zmq.curve_keypair()
    return ClusterKeys(public=public, private=private, accepted=accepted)


class SlowServer:
    """Answers when it is told to."""

    def __init__(self, context: zmq.Context[Socket], keys: ClusterKeys, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.private
        eventually(self._binds, 10.0)  # ZMQ closes a server of before in a thread of its own
        self._asked: list[tuple[bytes, int, int]] = []

    def _binds(self) -> bool:
        try:
            self._socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    def take(self, n: int) -> list[bytes]:
        """Take so many requests; return whom they came from."""
        froms = []
        for _ in range(n):
            assert self._socket.poll(10_000), "a request has not come"
            route, message = self._socket.recv_multipart()
            _, _, kind, request_id, _, _, _ = HEADER.unpack_from(message)
            self._asked.append((route, kind, request_id))
            froms.append(route)
        return froms

    def answer(self, *, version: int = VERSION, boot: int = 1) -> None:
        """Answer the oldest request."""
        route, kind, request_id = self._asked.pop(0)
        header = HEADER.pack(MAGIC, version, kind | REPLY, request_id, boot, 0, 0)
        self._socket.send_multipart([route, header + PROBE_REPLY.pack(5, 6)])

    def answer_at_once(self, ask: Callable[[], object]) -> None:
        """Answer the next request, which ``ask`` sends and waits for."""
        asking = threading.Thread(target=ask)
        asking.start()
        self.take(1)
        self.answer()
        asking.join(30.0)
        assert not asking.is_alive()

    def garble(self) -> None:
        """Answer the oldest request with what is none."""
        self._socket.send_multipart([self._asked.pop(0)[0], b"nonsense"])

    def close(self) -> None:
        self._socket.close()


class Bench:
    """One asker and one server."""

    def __init__(
        self, context: zmq.Context[Socket], client_keys: ClusterKeys, server_keys: ClusterKeys
    ) -> None:
        self.context = context
        self.client = ControlClient(context, client_keys)
        self.lines = PatientLines(self.client)
        self.server_keys = server_keys
        self.port = free_port()
        self.server = SlowServer(context, server_keys, self.port)
        self.probe = Request(self.server.address, Kind.PROBE)

    def ask_in_vain(self) -> None:
        assert self.lines.ask([self.probe], AT_ONCE_S) == [None]

    def late(self, n: int) -> list[LateAnswer]:
        """Return late answers once there are so many."""
        found: list[LateAnswer] = []

        def are_there() -> bool:
            found.extend(self.lines.late())
            return len(found) >= n

        eventually(are_there, 10.0)
        return found


@contextmanager
def bench_of(client_keys: ClusterKeys, server_keys: ClusterKeys) -> Iterator[Bench]:
    context: zmq.Context[Socket] = zmq.Context()
    bench = Bench(context, client_keys, server_keys)
    try:
        yield bench
    finally:
        bench.server.close()
        bench.client.close()
        context.destroy(0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    keys = new_keys()
    with bench_of(keys, keys) as bench:
        yield bench


def test_an_answer_that_comes_late_is_taken_in_with_the_time_of_its_question(bench: Bench) -> None:
    before = time.monotonic()
    bench.ask_in_vain()
    after = time.monotonic()
    bench.server.take(1)
    bench.server.answer(boot=9)
    [answer] = bench.late(1)
    assert answer.request is bench.probe
    assert before <= answer.asked_at <= after - AT_ONCE_S
    assert answer.reply.boot == 9
    assert bench.lines.n_waiting == 0


def test_who_waits_for_an_answer_does_something_else_meanwhile(bench: Bench) -> None:
    answered: list[int] = []

    def answer() -> None:
        if not answered:
            answered.extend(bench.server.take(1))
            bench.server.answer(boot=9)

    [reply] = bench.lines.ask([bench.probe], 60.0, answer)
    assert reply is not None
    assert reply.boot == 9


def test_what_is_asked_next_goes_by_the_connection_that_waits(bench: Bench) -> None:
    bench.ask_in_vain()
    bench.ask_in_vain()
    first, second = bench.server.take(2)
    assert first == second
    assert bench.lines.n_waiting == 1


def test_after_a_quarter_of_the_patience_another_connection_is_tried(bench: Bench) -> None:
    bench.lines.patience_s = 60.0
    bench.ask_in_vain()
    began = time.monotonic()
    for _ in range(5):
        bench.ask_in_vain()
    # However long that took: a quarter has passed, and most of it is left.
    bench.lines.patience_s = 4 * (time.monotonic() - began)
    bench.ask_in_vain()
    assert sorted(Counter(bench.server.take(7)).values()) == [1, 6]
    assert bench.lines.n_waiting == 2


def test_the_answer_to_a_later_question_ends_the_wait_for_earlier_ones(bench: Bench) -> None:
    bench.ask_in_vain()
    bench.server.take(1)
    bench.server._asked.clear()  # it was on its way to a process that has ended
    bench.ask_in_vain()
    bench.server.take(1)
    bench.server.answer()
    assert len(bench.late(1)) == 1
    assert bench.lines.n_waiting == 0


def test_a_late_answer_is_nobody_elses(bench: Bench) -> None:
    bench.ask_in_vain()
    bench.server.take(1)
    bench.server.answer(boot=7)
    bench.server._socket.close()
    assert bench.lines.ask([Request(bench.server.address, Kind.GOSSIP)], AT_ONCE_S) == [None]
    assert [(answer.request.kind, answer.reply.boot) for answer in bench.late(1)] == [(Kind.PROBE, 7)]


def test_what_has_long_been_there_is_seen_by_who_could_not_run_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = zmq.zmq_poll
    polls: list[int] = []

    def slow_poll(sockets: list[tuple[Socket, int]], wait_ms: int) -> list[Any]:
        """Be held, the first time, until the call's time is over; the answer comes meanwhile."""
        polls.append(wait_ms)
        if len(polls) > 1:
            return poll(sockets, wait_ms)
        bench.server.take(1)
        bench.server.answer()
        assert poll(sockets, 10_000), "the answer has not come"
        time.sleep(2 * AT_ONCE_S)
        return []

    monkeypatch.setattr("p2pkv.control.patience.zmq.zmq_poll", slow_poll)
    [reply] = bench.lines.ask([bench.probe], AT_ONCE_S)
    assert reply is not None


def test_one_idle_connection_is_left_of_several_that_have_answered(bench: Bench) -> None:
    bench.lines.patience_s = 4 * AT_ONCE_S
    for _ in range(3):
        bench.ask_in_vain()
    assert bench.lines.n_waiting == 3
    bench.server.take(3)
    bench.lines.patience_s = 60.0
    for _ in range(3):
        bench.server.answer()
    bench.late(3)
    eventually(lambda: bench.lines.late() == [] and bench.lines.n_waiting == 0, 10.0)
    assert len(bench.client._idle._by_address[bench.server.address]) == 1


def test_a_server_of_another_secret_after_a_restart_is_heard_at_the_second_question() -> None:
    old = new_keys()
    keys = new_keys(old)
    with bench_of(keys, old) as bench:
        bench.server.answer_at_once(lambda: bench.lines.ask([bench.probe], 10.0))
        bench.server.close()
        bench.server = SlowServer(bench.context, keys, bench.port)
        bench.ask_in_vain()
        bench.lines.ask([bench.probe], AT_ONCE_S)
        bench.server.take(1)
        bench.server.answer()
        assert len(bench.late(1)) == 1


def test_what_is_asked_by_every_secret_waits_on_by_the_same_connections() -> None:
    old = new_keys()
    with bench_of(new_keys(old), old) as bench:
        bench.ask_in_vain()
        bench.ask_in_vain()
        first, second = bench.server.take(2)
        assert first == second
        assert bench.lines.n_waiting == 1
        bench.server.answer()
        bench.late(1)
        bench.ask_in_vain()  # the one that has answered leads to it, whatever else is unanswered
        assert bench.server.take(1) == [second]
        assert bench.lines.n_waiting == 1


def test_an_answer_that_can_not_be_used_ends_the_call(bench: Bench) -> None:
    replies: list[object] = []
    asking = threading.Thread(target=lambda: replies.extend(bench.lines.ask([bench.probe], 60.0)))
    asking.start()
    bench.server.take(1)
    bench.server.garble()
    asking.join(30.0)
    assert replies == [None]


def test_who_never_answers_is_not_waited_for_longer_than_patience_lasts(bench: Bench) -> None:
    bench.ask_in_vain()
    assert bench.lines.n_waiting == 1
    bench.lines.patience_s = 0.0
    assert bench.lines.late() == []
    assert bench.lines.n_waiting == 0


def test_connections_are_bounded_though_nobody_takes_late_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.control.patience._MAX_WAYS", 3)
    monkeypatch.setattr("p2pkv.control.patience._WAYS_A_PEER", 1_000_000_000)
    for _ in range(20):
        bench.lines.ask([bench.probe], 0.0)
    assert bench.lines.n_waiting <= 4


@pytest.mark.parametrize("spoil", [SlowServer.garble, lambda server: server.answer(version=VERSION + 1)])
def test_an_answer_that_can_not_be_used_is_said_and_its_connection_closed(
    bench: Bench, spoil: Callable[[SlowServer], None], caplog: pytest.LogCaptureFixture
) -> None:
    bench.ask_in_vain()
    bench.server.take(1)
    spoil(bench.server)
    eventually(lambda: bench.lines.late() == [] and bench.lines.n_waiting == 0, 10.0)
    assert "that can't be used" in caplog.text


def test_a_server_that_goes_by_another_secret_is_heard_late_too() -> None:
    old = new_keys()
    with bench_of(new_keys(old), old) as bench:
        bench.ask_in_vain()
        bench.server.take(1)
        bench.server.answer()
        assert len(bench.late(1)) == 1
        assert bench.lines.n_waiting == 0


def test_asking_ends_with_the_client(bench: Bench) -> None:
    bench.ask_in_vain()
    bench.client.close()
    with pytest.raises(ClosedError):
        bench.lines.ask([bench.probe], 5.0)
