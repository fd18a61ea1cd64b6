"""The engine's thread: it runs, it ends with ``close``, and a failure in it is told."""

import queue
import threading

import pytest

from p2pkv.directory.membership.base import Identity, Listeners, ProbeReply
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import Member, State, decode, encode, node_key
from p2pkv.errors import MembershipError


class LonelyNetwork:
    """A network on which nobody else is; blocks in real time."""

    address = "h0:7000"

    def __init__(self):
        self.inbox = queue.Queue()
        self.announced = None
        self.shown = set()
        self.broken = False
        self.answers = {}
        self.withdrawn = threading.Event()
        self.came_back = threading.Event()

    def announce(self, node_key, boot_epoch):
        self.announced = (node_key, boot_epoch)
        if self.withdrawn.is_set():
            self.came_back.set()

    def withdraw(self):
        self.announced = None
        self.withdrawn.set()

    def set_view(self, blob, digest):
        self.shown = {member.node_id for member in decode(blob).members}

    def probe(self, addresses, timeout, meanwhile=None):
        return [self.answers.get(address) for address in addresses]

    def tell(self, messages, timeout):
        return [None] * len(messages)

    def exchange(self, addresses, blob, timeout):
        return [None] * len(addresses)

    def late(self, stretch):
        return []

    def received(self, timeout):
        if self.broken:
            raise ZeroDivisionError("a bug")
        try:
            blob = self.inbox.get(timeout > 0, timeout)
        except queue.Empty:
            return []
        return [blob] if blob else []

    def resolve(self, address):
        return [address]

    def listen_also(self, address):
        return False

    def listen_no_more(self):
        self.gave_up = True

    def why_silent(self, address, tell):
        tell("nobody is there")

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
        assert told.get(timeout=60) == (threading.current_thread().name, {"n0"})
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert told.get(timeout=60) == ("p2pkv-membership", {"n0", "n1"})


def test_who_comes_while_a_silent_member_is_waited_for_is_believed_before_that_is_over(network):
    seen = queue.Queue()

    def probe(addresses, timeout, meanwhile=None):
        if "h1:7000" in addresses and meanwhile is not None:
            meanwhile()
            network.inbox.put(encode("n2", [Member("n2", 1, "h2:7000")]))
            meanwhile()
            seen.put((set(membership.view()), network.shown))
        return [None] * len(addresses)

    network.probe = probe
    with EmbeddedMembership(network, Identity("n0")) as membership:
        membership.start(1.0)
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert seen.get(timeout=60) == ({"n0", "n1", "n2"}, {"n0", "n1", "n2"})


def test_a_successor_is_not_doubted_for_the_silence_of_the_one_before(network):
    timing = Timing(misses_to_suspect=1)
    doubted, rounds = [], queue.Queue()

    def on_change(_old, new):
        doubted.extend(member for member in new.values() if member.state is not State.ALIVE)

    def probe(addresses, timeout, meanwhile=None):
        if "h1:7000" in addresses and meanwhile is not None:
            network.inbox.put(encode("n1", [Member("n1", 2, "h2:7000")]))
            meanwhile()
        rounds.put(addresses)
        return [ProbeReply(node_key("n1"), 2, 0) if address == "h2:7000" else None for address in addresses]

    network.probe = probe
    with EmbeddedMembership(
        network, Identity("n0"), listeners=Listeners(on_change), timing=timing
    ) as membership:
        membership.start(1.0)
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        while rounds.get(timeout=60) != ["h2:7000"]:
            pass
        assert membership.view()["n1"].boot_epoch == 2
    assert doubted == []


def test_a_death_is_noticed_in_real_time(network):
    dead = threading.Event()

    def on_change(_old, new):
        if "n1" in new and new["n1"].state is State.DEAD:
            dead.set()

    with EmbeddedMembership(network, Identity("n0"), listeners=Listeners(on_change)) as membership:
        membership.start(1.0)
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert dead.wait(60.0)


def test_a_listener_may_close_the_membership_from_the_thread(network):
    closed = threading.Event()
    membership = EmbeddedMembership(
        network,
        Identity("n0"),
        listeners=Listeners(on_expelled=lambda _reason: (membership.close(), closed.set())),
    )
    membership.start(1.0)
    thread = engine_threads()[0]
    rival = Member("n0", membership.boot_epoch + 1, "h1:7000")
    network.answers["h1:7000"] = ProbeReply(rival.key, rival.boot_epoch, 0)
    network.inbox.put(encode("n0", [rival]))
    assert closed.wait(60.0)
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_failing_membership_withdraws_tries_on_and_comes_back(network, caplog):
    with EmbeddedMembership(network, Identity("n0"), timing=Timing(probe_interval=0.02)) as membership:
        membership.start(1.0)
        network.broken = True
        network.wake()
        assert network.withdrawn.wait(60)
        network.broken = False
        assert network.came_back.wait(60)
        assert membership.counters()["p2pkv_membership_failures_total"] >= 10
    assert "it goes on trying" in caplog.text


def test_a_listener_that_fails_is_told_again(network):
    told = queue.Queue()
    views = []

    def on_change(_old, new):
        views.append(set(new))
        told.put(set(new))
        if len(views) == 2:
            raise ZeroDivisionError("a bug")

    with EmbeddedMembership(network, Identity("n0"), listeners=Listeners(on_change)) as membership:
        membership.start(1.0)
        network.inbox.put(encode("n1", [Member("n1", 1, "h1:7000")]))
        assert [told.get(timeout=60) for _ in range(3)] == [{"n0"}, {"n0", "n1"}, {"n0", "n1"}]
        assert network.announced is not None
