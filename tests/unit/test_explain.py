"""``explain`` says where a page is, or why it is not there: each reason once, as a node and as an outsider hear it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster import eventually
from p2pkv import Config, ControlError, Node, UsageError
from p2pkv.cli import app
from p2pkv.cli.outsider import Outsider
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import Request
from p2pkv.control.wire import Kind, ReplyStatus
from p2pkv.explain.asking import question_about
from p2pkv.explain.events import SENTENCES, PageEvent
from p2pkv.explain.explanation import Explanation, Verdict
from p2pkv.explain.messages import MAX_KEY_BYTES, Answer, Question, decode, encode
from p2pkv.explain.namespaces import differences, nearest
from p2pkv.explain.sentences import VERDICTS, age, lines, record
from p2pkv.explain.watch import NamespaceWatch
from p2pkv.metrics import MISSES
from p2pkv.testing.ports import free_port

PAGE = 8192
POOL = 8 * PAGE
TIMEOUT = 5.0


class World:
    """Nodes of one cluster, each with memory for eight pages."""

    def __init__(self, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_text("the secret of a test, long enough\n")
        secret.chmod(0o600)
        self.secret = str(secret)
        self.join = f"127.0.0.1:{free_port()}"
        self.nodes: dict[str, Node] = {}
        self.memory: dict[str, np.ndarray] = {}

    def start(self, node_id: str, **more: object) -> Node:
        settings = {"pool_size": POOL, "buffer_size": 0, "join": [self.join], "secret_file": self.secret}
        node = Node.start(Config(node_id=node_id, deadline=TIMEOUT, **(settings | more)))  # type: ignore[arg-type]
        self.nodes[node_id] = node
        self.memory[node_id] = np.ones((8, PAGE), np.uint8)
        node.register_memory(self.memory[node_id])
        eventually(lambda: all(len(n.members()) == len(self.nodes) for n in self.nodes.values()), 10.0)
        return node

    def publish(self, node_id: str, *keys: str) -> None:
        assert self.nodes[node_id].publish(list(keys), self.memory[node_id][: len(keys)]).all()

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def two(world: World) -> World:
    world.start("a")
    world.start("b")
    return world


def _by_both(world: World, key: str) -> Explanation:
    """Ask as either node; both must say the same of it, however they come to know."""
    explained = [node.explain(key) for node in world.nodes.values()]
    assert len({e.verdict for e in explained}) == 1, explained
    assert len({e.places for e in explained}) == 1, explained
    return explained[0]


def test_a_page_that_is_there_is_found_with_its_place_size_and_age(two: World) -> None:
    before = time.time()
    two.publish("a", "k")
    explained = _by_both(two, "k")
    (place,) = explained.places
    assert explained.verdict is Verdict.IN_POOL
    assert (place.node_id, place.medium, place.nbytes, place.is_told) == ("a", "pool", PAGE, True)
    assert place.stored_at is not None
    assert before - 0.1 <= place.stored_at <= time.time() + 0.1
    assert explained.answered == ("a", "b")
    assert explained.silent == ()


def test_a_page_that_two_have_is_found_with_both(two: World) -> None:
    two.publish("a", "k")
    two.publish("b", "k")
    assert [place.node_id for place in _by_both(two, "k").places] == ["a", "b"]


def test_a_page_that_was_never_there_is_unknown_since_when_anybody_remembers(two: World) -> None:
    explained = _by_both(two, "k")
    assert explained.verdict is Verdict.UNKNOWN
    assert explained.happenings == ()
    assert 0 < time.time() - explained.remembers_since < 60


def test_an_evicted_page_was_evicted_then(two: World) -> None:
    two.publish("a", "old")
    two.publish("a", *(f"new{i}" for i in range(8)))
    explained = _by_both(two, "old")
    assert explained.verdict is Verdict.EVICTED
    (evicted,) = [h for h in explained.happenings if h.event is PageEvent.EVICTED]
    assert evicted.node_id == "a"
    assert 0 <= time.time() - evicted.at < 60


def test_a_page_taken_back_was_taken_back_and_found_when_published_again(two: World) -> None:
    two.publish("a", "k")
    two.nodes["a"].retract(["k"])
    assert _by_both(two, "k").verdict is Verdict.RETRACTED
    two.publish("b", "k")
    assert _by_both(two, "k").verdict is Verdict.IN_POOL


def test_a_cleared_page_was_cleared(two: World) -> None:
    two.publish("a", "k")
    two.nodes["a"].clear()
    assert _by_both(two, "k").verdict is Verdict.CLEARED


def test_a_page_of_before_a_bump_says_so(two: World) -> None:
    two.publish("a", "k")
    bump = two.nodes["b"].bump()
    explained = _by_both(two, "k")
    assert explained.verdict is Verdict.BUMPED
    assert explained.epoch == bump.epoch
    assert any("in epoch 0" in line for line in lines(explained))


def test_the_owner_that_died_is_named(two: World) -> None:
    two.publish("a", "k")
    eventually(lambda: bool(two.nodes["b"].exists(["k"]).all()), 10.0)
    two.nodes.pop("a").close()
    b = two.nodes["b"]
    eventually(lambda: len(b.members()) == 1, 10.0)
    explained = b.explain("k")
    assert explained.verdict is Verdict.OWNER_GONE
    assert explained.owners_gone == ("a",)
    # the entry itself goes after ten seconds; what it was is remembered
    control = b._parts.control
    later = int(time.monotonic()) + 60
    for second in range(later, later + 30):
        control.shard.set_time(second)
        control.shard.confirm_view()
        for _ in range(64):
            control.shard.sweep()
    assert control.shard.entries_of(bytes.fromhex(explained.page_id)) == []
    explained = b.explain("k")
    assert (explained.verdict, explained.owners_gone) == (Verdict.OWNER_GONE, ("a",))


def test_a_page_in_another_namespace_is_found_with_what_differs(world: World) -> None:
    world.start("a", namespace="prod model=llama dtype=fp8")
    world.start("b", namespace="prod model=llama dtype=bf16")
    world.publish("a", "k")
    explained = world.nodes["b"].explain("k")
    assert explained.verdict is Verdict.OTHER_NAMESPACE
    ((node_id, difference),) = explained.elsewhere
    assert node_id == "a"
    assert difference.words == (("dtype", "bf16", "fp8"),)
    assert "dtype is bf16 here and fp8 there" in "\n".join(lines(explained))


def test_a_page_on_disk_only_is_on_disk(world: World, tmp_path: Path) -> None:
    node = world.start("a", disk_size="8MiB", disk_path=str(tmp_path / "disk"))
    world.publish("a", "k")
    caching = node._parts.caching
    assert caching is not None
    assert caching.tier is not None
    caching.tier.flush(10.0)
    world.publish("a", *(f"new{i}" for i in range(8)))
    explained = node.explain("k")
    assert explained.verdict is Verdict.ON_DISK
    assert [(place.medium, place.nbytes) for place in explained.places] == [("disk", PAGE)]
    node.retract(["k"])
    assert node.explain("k").verdict is Verdict.RETRACTED


def test_a_page_that_a_publish_had_no_room_for_was_not_taken(world: World) -> None:
    node = world.start("a")
    world.publish("a", *(f"k{i}" for i in range(8)))
    caching = node._parts.caching
    assert caching is not None
    ids = caching.cache.hash([f"k{i}" for i in range(8)])[1]
    # half of a pool may be pinned; the other half is taken by pages that are being read
    caching.pool.pin(ids[:4], 60.0)
    assert not node.publish([f"n{i}" for i in range(8)], world.memory["a"]).all()
    assert node.explain("n7").verdict is Verdict.NOT_TAKEN


def test_what_was_missed_and_why_is_told(two: World) -> None:
    two.nodes["a"].fetch(["k"], two.memory["a"][:1])
    explained = two.nodes["b"].explain("k")
    assert explained.verdict is Verdict.UNKNOWN
    assert [(h.node_id, h.event) for h in explained.happenings] == [("a", PageEvent.MISSED_NOT_FOUND)]


def _invoke(world: World, *arguments: str) -> str:
    node = next(iter(world.nodes.values()))
    options = ["--join", node.address, "--set", f"secret_file={world.secret}"]
    result = CliRunner().invoke(app, ["explain", *arguments, *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_asks_without_joining_and_says_it_in_sentences_and_in_json(two: World) -> None:
    two.publish("a", "k")
    assert "a has it in its pool, 8192 bytes" in _invoke(two, "k")
    told = json.loads(_invoke(two, "k", "--json"))
    assert (told["verdict"], told["places"][0]["node_id"]) == ("in_pool", "a")
    assert len(two.nodes["a"].members()) == 2
    by_id = json.loads(_invoke(two, told["page_id"], "--id", "--json"))
    assert by_id["places"] == told["places"]
    other = json.loads(_invoke(two, "k", "--namespace", "another", "--json"))
    assert other["verdict"] == "other_namespace"
    as_setting = json.loads(_invoke(two, "k", "--set", "namespace=another", "--json"))
    assert as_setting["verdict"] == "other_namespace"


def test_an_outsider_finds_pages_in_whatever_namespace_their_nodes_have(world: World) -> None:
    world.start("a", namespace="one")
    world.start("b", namespace="two")
    world.publish("b", "k")
    told = json.loads(_invoke(world, "k", "--json"))
    assert (told["verdict"], told["namespace"]) == ("in_pool", "")


def test_a_node_that_does_not_answer_is_named(two: World) -> None:
    with Outsider(cluster_keys(two.secret)) as outsider:
        members = two.nodes["a"].members()
        assert {member.node_id for member in members} == {"a", "b"}
        two.nodes["b"]._parts.control.server.loop.stop()
        explained = outsider.explain(question_about("k"), [two.nodes["a"].address], 2.0)
    assert explained.silent == ("b",)
    assert "not heard from: b" in "\n".join(lines(explained))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80\x80",
        encode(Question(id=b"short")),
        encode(Question(key=b"k" * (MAX_KEY_BYTES + 1))),
        encode(Question(version=2)),
    ],
    ids=["empty", "no msgpack", "more behind", "short id", "long key", "version"],
)
def test_a_malformed_question_is_refused_and_the_next_one_answered(two: World, body: bytes) -> None:
    a, b = two.nodes.values()
    with a._parts.control.client.send([Request(b.address, Kind.EXPLAIN, body)]) as calls:
        ((_, reply),) = calls.replies(5.0)
    assert reply.status is ReplyStatus.MALFORMED
    assert reply.body
    assert a.explain("k").answered == ("a", "b")


def test_answers_of_what_no_node_could_have_sent_are_refused() -> None:
    with pytest.raises(ControlError, match="no answer"):
        decode(b"\x81\xa7node_id\x01", Answer)
    with pytest.raises(ControlError, match="version 1, not 7"):
        decode(encode(Answer("n", "", 0, version=7)), Answer)


def test_fields_that_a_later_version_adds_are_let_through() -> None:
    import msgspec

    later = msgspec.msgpack.encode({"version": 1, "key": b"k", "color": "blue"})
    assert decode(later, Question) == Question(key=b"k")


@pytest.mark.parametrize("key", [None, 7])
def test_what_can_be_no_key_is_an_error(two: World, key: object) -> None:
    with pytest.raises(UsageError):
        two.nodes["a"].explain(key)  # type: ignore[arg-type]


def test_every_event_and_verdict_has_a_sentence() -> None:
    assert set(SENTENCES) == set(PageEvent)
    assert set(VERDICTS) == set(Verdict)
    source = (Path(__file__).parents[2] / "native/src/page/page_history.h").read_text()
    native = dict(re.findall(r"^  k(\w+) = (\d+),", source, re.MULTILINE))
    ours = {
        "".join(word.capitalize() for word in event.name.split("_")): str(int(event)) for event in PageEvent
    }
    ours = {name: number for name, number in ours.items() if not name.startswith("Missed")} | {"Missed": "48"}
    assert native == ours


def test_ages_are_said_to_what_a_reader_cares_for() -> None:
    assert [age(seconds) for seconds in (-1, 0.25, 119, 600, 7300, 200_000)] == [
        "0.0 s",
        "0.2 s",
        "119.0 s",
        "10 min",
        "2 h",
        "2 days",
    ]


def test_a_record_is_plain_values(two: World) -> None:
    two.publish("a", "k")
    assert json.loads(json.dumps(record(two.nodes["a"].explain("k"))))["key"] == "k"


# a namespace that is not that of the peers


def test_namespaces_are_compared_word_by_word() -> None:
    assert differences("llama-7b", "llama-7b-").words == (("", "llama-7b", "llama-7b-"),)
    assert differences("p m=1 x=2", "p m=1").words == (("x", "2", ""),)
    assert str(differences("p m=1", "p m=2")) == "m is 1 here and 2 there"
    closest = nearest("p m=1 d=fp8", ["q m=9 d=x", "p m=1 d=bf16"])
    assert closest is not None
    assert closest.namespace == "p m=1 d=bf16"


class Peers:
    """What a watch asks."""

    def __init__(self, *namespaces: str) -> None:
        self.namespaces = namespaces
        self.seen = (0.0, 0.0)
        self.n_asked = 0

    def ask(self, question: Question, timeout: float) -> list[Answer]:
        self.n_asked += 1
        return [Answer(f"n{i}", name, 0) for i, name in enumerate(self.namespaces)]

    def watch(self, namespace: str) -> NamespaceWatch:
        return NamespaceWatch(namespace, lambda: self.seen, self.ask)


def test_a_node_that_finds_nothing_and_shares_its_namespace_with_nobody_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = Peers("llama-7b-", "other")
    watch = peers.watch("llama-7b")
    peers.seen = (900, 0)
    watch.turn()
    assert peers.n_asked == 0
    peers.seen = (1800, 0)
    watch.turn()
    assert "none of 2 peers has the namespace of this node, 'llama-7b'" in caplog.text
    assert "'llama-7b-' of n0: is llama-7b here and llama-7b- there" in caplog.text
    assert watch.readings() == {"p2pkv_fruitless_look_ups_total": 1800, "p2pkv_namespace_peers": 0}


def test_a_node_that_finds_something_or_has_a_peer_of_its_namespace_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = Peers("mine", "other")
    watch = peers.watch("mine")
    peers.seen = (5000, 0)
    watch.turn()
    assert watch.readings()["p2pkv_namespace_peers"] == 1
    peers.namespaces = ("other",)
    peers.seen = (9000, 1)
    watch.turn()
    peers.seen = (9900, 1)
    watch.turn()
    assert watch.readings()["p2pkv_fruitless_look_ups_total"] == 5900
    assert caplog.text == ""


def test_look_ups_in_vain_between_real_nodes_are_noticed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start("a", namespace="x model=1")
    b = world.start("b", namespace="x model=2")
    world.publish("a", "k0")
    b.exists([f"k{i}" for i in range(3000)])
    caching = b._parts.caching
    assert caching is not None
    NamespaceWatch("x model=2", caching.looked_up, b._parts.explainer.ask).turn()
    assert "model is 2 here and 1 there" in caplog.text


def test_every_reason_for_a_miss_has_its_event() -> None:
    events = [PageEvent(PageEvent.MISSED_NOT_FOUND + i).name for i in range(len(MISSES))]
    assert events == [f"MISSED_{reason.upper()}" for reason in MISSES]


def test_what_happened_again_and_again_is_one_line(two: World) -> None:
    for _ in range(4):
        assert not two.nodes["a"].fetch(["nobody has it"], two.memory["a"][:1]).any()
    two.publish("a", "nobody has it")
    explained = two.nodes["a"].explain("nobody has it")
    told = [line for line in lines(explained) if " a: it " in line]
    assert len(explained.happenings) >= 5
    assert len(told) < len(explained.happenings)
    assert any("; 3 times more, until " in line for line in told if "missed" in line), told
