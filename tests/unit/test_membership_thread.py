"""The engine's thread: it runs, it ends with ``close``, and a failure in it is told."""

import queue
import threading

import pytest

from p2pkv.directory.membership.base import Identity, Listeners
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.view import Member, State, encode
from p2pkv.errors import MembershipError


class LonelyNetwork:
    """A network on which nobody else is; blocks in real time."""

    address = "h0:7000"

    def __init__(self):
        self.inbox = queue.Queue()
        self.announced = None
        self.broken = False

    def announce(self, node_key, boot_epoch):
        self.announced = (node_key, boot_epoch)

    def withdraw(self):
        self.announced = None

    def set_view(self, blob, digest):
        pass

    def probe(self, addresses, timeout):
        return [None] * len(addresses)

    def exchange(self, addresses, blob, timeout):
        return [None] * len(addresses)

    def received(self, timeout):
        if self.broken:
            raise ZeroDivisionError("a bug")
        try:
            blob = self.inbox.get(timeout=timeout) if timeout else None
        except queue.Empty:
            return []
        return [blob] if blob else []

    def listen_also(self, address):
        return False

    def wake(self):
        self.inbox.put(None)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "p2pkv-membership"]


@pytest.fixture
def network():
    return LonelyNetwork()


def test_the_thread_lives_from_start_to_close(network):
    membership = EmbeddedMembership(network, Identity("n0"))
    assert len(membership.view()) == 0
    assert membership.boot_epoch == 0
    with membership:
        membership.start(1.0)
        assert len(engine_threads()) == 1
        assert membership.view()["n0"].boot_epoch == membership.boot_epoch
        assert network.announced is not None
    assert engine_threads() == []
    assert network.announced is None
    membership.close()


def test_it_can_not_be_started_twice(network):
    with EmbeddedMembership(network, Identity("n0")) as membership:
        membership.start(1.0)
        with pytest.raises(MembershipError, match="build another one"):
            membership.start(1.0)


def test_closing_before_the_start_is_fine(network):
    membership = EmbeddedMembership(network, Identity("n0"))
    membership.close()
    with pytest.raises(MembershipError, match="build another one"):
        membership.start(1.0)
    assert engine_threads() == []


def test_what_peers_hand_over_is_told_from_the_thread(network):
    told = queue.Queue()

    def on_change(_old, new):
        told.put((threading.current_thread().name, set(new)))

    with EmbeddedMembership(network, Identity("n0"), listeners=Listeners(on_change)) as membership:
        membership.start(1.0)
        assert told.get(timeout=10) == (threading.current_thread().name, {"n0"})
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert told.get(timeout=10) == ("p2pkv-membership", {"n0", "n1"})


def test_a_death_is_noticed_in_real_time(network):
    dead = threading.Event()

    def on_change(_old, new):
        if "n1" in new and new["n1"].state is State.DEAD:
            dead.set()

    with EmbeddedMembership(network, Identity("n0"), listeners=Listeners(on_change)) as membership:
        membership.start(1.0)
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert dead.wait(20)


def test_a_listener_may_close_the_membership_from_the_thread(network):
    closed = threading.Event()
    membership = EmbeddedMembership(
        network,
        Identity("n0"),
        listeners=Listeners(on_expelled=lambda _reason: (membership.close(), closed.set())),
    )
    membership.start(1.0)
    thread = engine_threads()[0]
    network.inbox.put(encode("n0", [Member("n0", membership.boot_epoch + 1, "h1:7000")]))
    assert closed.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_a_bug_in_the_thread_expels_the_node(network, caplog):
    reasons = queue.Queue()
    with EmbeddedMembership(
        network, Identity("n0"), listeners=Listeners(on_expelled=reasons.put)
    ) as membership:
        membership.start(1.0)
        network.broken = True
        network.wake()
        assert "a bug" in reasons.get(timeout=10)
        assert network.announced is None
    assert "membership stops" in caplog.text
