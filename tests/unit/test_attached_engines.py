"""A node and an engine that attaches to it, in one process."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import eventually
from p2pkv import Config, Node
from p2pkv.attach.cache import AttachedCache
from p2pkv.attach.finding import Finding
from p2pkv.directory.ring import Ring
from p2pkv.directory.routers import pack_news
from p2pkv.directory.view import DEFAULT_CLUSTER
from p2pkv.errors import ConfigError
from p2pkv.page import Keys, page_key, row_pieces
from p2pkv.testing.ports import free_port
from p2pkv.tracing import about
from spans import exported_to

KEYS = ["a", "b"]
NBYTES = 64 * 1024
N_ROOM = 32
"""Pages that the pool of a host has room for."""


def test_calls_of_an_attached_engine_have_spans(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, 4096), np.uint8)
    exporter = InMemorySpanExporter()
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")),
        Node.start(Config(node_id="engine", attach=path, tracing=True)) as engine,
        exported_to(exporter),
        about("request-17"),
    ):
        engine.register_memory(pages)
        assert engine.publish(KEYS, pages, timeout=20.0).all()
        assert engine.fetch(KEYS, pages, timeout=20.0).all()
        told = {
            (span.name, span.attributes["p2pkv.node"], span.attributes["p2pkv.request"])
            for span in exporter.get_finished_spans()
            if span.attributes is not None
        }
    assert {("p2pkv.publish", "engine", "request-17"), ("p2pkv.fetch", "engine", "request-17")} <= told


def test_an_engine_follows_the_pages_that_it_has_published_and_no_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, NBYTES), np.uint8)
    there: set[bytes] = set()

    def hear(kind: str, medium: str, keys: Sequence[bytes]) -> None:
        assert medium == "CPU"
        if kind == "BlockStored":
            assert there.isdisjoint(keys), "told twice"
            there.update(keys)
        else:
            assert there.issuperset(keys), "gone before it was there"
            there.difference_update(keys)

    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size=N_ROOM * NBYTES)) as host,
        Node.start(Config(node_id="engine", attach=path)) as engine,
    ):
        host.register_memory(pages)
        assert engine.owner_id == host.owner_id == "host"
        others = pages.copy()
        engine.register_memory(others)
        assert engine.publish(["before"], others[:1], timeout=20.0).all()
        engine.follow_kv_events(hear)
        assert engine.publish(KEYS, others, timeout=20.0).all()
        told = {page_key("default", key.encode(), 0) for key in KEYS}
        eventually(lambda: there == told, 10.0)
        for i in range(N_ROOM):  # nobody has used them since, so they go
            assert host.publish([f"other-{i}"], pages[:1], timeout=20.0).all()
        eventually(lambda: not there, 10.0)
        assert engine.publish(KEYS, others, timeout=20.0).all()
        eventually(lambda: there == told, 10.0)
        host.bump(timeout=20.0)
        eventually(lambda: not there, 10.0)


def test_a_bump_holds_at_once_for_an_engine_that_has_asked_nobody(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, 4096), np.uint8)
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")) as host,
        Node.start(Config(attach=path)) as engine,
    ):
        engine.register_memory(pages)
        engine._parts.epochs.close()  # what asks the members once a second
        assert engine.publish(KEYS, pages, timeout=20.0).all()
        assert engine.exists(KEYS, timeout=20.0).all()
        host.bump(timeout=20.0)
        assert not engine.exists(KEYS, timeout=20.0).any()
        assert engine.epoch == host.epoch > 0


def test_pages_whose_engine_ended_before_it_told_the_directory_are_found_from_other_hosts(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    path, join = f"unix:{tmp_path}/s", [f"127.0.0.1:{free_port()}"]
    keys, pages = [f"page-{i}" for i in range(64)], np.ones((64, 4096), np.uint8)
    with (
        Node.start(Config(node_id="other", join=join, replicas=1, pool_size="1MiB")) as other,
        Node.start(Config(node_id="host", join=join, replicas=1, attach_listen=path)) as host,
    ):
        eventually(lambda: len(other.members()) == len(host.members()) == 2, 10.0)
        with Node.start(Config(attach=path)) as engine:
            engine.register_memory(pages)
            cache, attachment = engine._cache, engine._parts.own_host.attachment
            assert isinstance(cache, AttachedCache)
            published = attachment.publish(
                cache.hash(keys)[1],
                row_pieces(pages),
                20.0,
                cache._directory.beside(attachment.node_key).table,
                cache._reader.locations,
            )
            assert published.is_found().all()
            assert not published.is_told
            told = published.is_known()
            assert 0 < told.sum() < len(keys)  # the others' entries lie at the other node
            assert not other.exists(keys, timeout=20.0).all()
        eventually(lambda: other.exists(keys, timeout=20.0).all(), 5.0)


class Behind:
    """An engine that has published by an earlier view than its node's, whose next look tells it of another member."""

    def __init__(self, host: Node, other: Node, engine: Node) -> None:
        keys, pages = [f"page-{i}" for i in range(64)], np.ones((64, 4096), np.uint8)
        eventually(lambda: len(other.members()) == len(host.members()) == 2, 10.0)
        announcer = host._parts.caching.announcer
        eventually(
            lambda: announcer._pass is None and [len(ring.members) for ring in announcer._rings] == [2], 10.0
        )
        engine.register_memory(pages)
        assert engine.publish(keys, pages, timeout=20.0).all()
        assert isinstance(engine._cache, AttachedCache)
        self.cache = engine._cache
        self.look = engine._parts.following._turn
        ring = Ring(host.members(), 1)
        own = [member.node_id for member in ring.members].index("other")
        self.n_moved = int((ring.owners(engine._cache.hash(keys)[1]) == own).sum())
        assert self.n_moved > 0
        self.other = other

    def is_put(self) -> bool:
        """Whether the other member has the entries that are its."""
        return self.other.counters()["p2pkv_shard_entries"] == self.n_moved


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    tmp_path.chmod(0o700)
    path, join = f"unix:{tmp_path}/s", [f"127.0.0.1:{free_port()}"]
    with (
        Node.start(Config(node_id="host", join=join, replicas=1, attach_listen=path)) as host,
        Node.start(Config(attach=path, replicas=1)) as engine,
    ):
        engine._parts.following.close()  # so that it does not hear of who joins
        with Node.start(Config(node_id="other", join=join, replicas=1, pool_size="1MiB")) as other:
            yield Behind(host, other, engine)


def test_what_was_published_by_an_earlier_view_than_the_nodes_is_put_where_it_belongs(behind: Behind) -> None:
    behind.look()
    eventually(behind.is_put, 5.0)


class Deaf:
    """A host's node that does not hear what it is named, in the place of the one that an engine is attached to."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def tell_missed(self, _keys: Keys, timeout: float) -> None:
        self.timeouts.append(timeout)


def test_what_the_node_has_not_heard_is_named_to_it_once_more(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = Deaf()
    with monkeypatch.context() as patched:
        patched.setattr(behind.cache._unsettled, "node", lambda: deaf)
        behind.look()
    assert len(deaf.timeouts) == 1
    behind.look()
    eventually(behind.is_put, 5.0)


def test_while_there_is_no_node_nothing_is_forgotten(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(behind.cache._unsettled, "node", lambda: None)
        for _ in range(4):
            behind.look()
    behind.look()
    eventually(behind.is_put, 5.0)


def test_a_publish_names_nothing_beyond_its_deadline(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = Deaf()
    with monkeypatch.context() as patched:
        patched.setattr(behind.cache._unsettled, "node", lambda: deaf)
        behind.cache.tell_unsettled(time.monotonic() - 1.0)
        assert deaf.timeouts == []
        behind.cache.tell_unsettled(time.monotonic() + 0.02)
    assert all(0 < timeout <= 0.02 for timeout in deaf.timeouts)
    behind.look()
    eventually(behind.is_put, 5.0)


def test_an_engine_hears_of_routers_from_its_node(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")) as host,
        Node.start(Config(attach=path)) as engine,
    ):
        assert host._parts._take_news(pack_news("10.0.0.1:8100", 600.0))
        eventually(lambda: engine.routers() == ("10.0.0.1:8100",), 10.0)


def clusters_node(name: str, tmp_path: Path, **settings: object) -> Node:
    """Start a node of the cluster called so; those of other names have the same secret."""
    (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
    given: dict[str, object] = {"node_id": f"{name}-1", "attach_listen": f"unix:{tmp_path}/{name}/s"}
    return Node.start(Config.load({"cluster": name, "pool_size": "1MiB", **given, **settings}, environ={}))


def test_an_engine_of_another_cluster_is_not_attached_and_one_of_none_goes_by_its_nodes(
    tmp_path: Path,
) -> None:
    path = f"unix:{tmp_path}/green/s"
    with clusters_node("green", tmp_path):
        with pytest.raises(ConfigError, match=r"cluster is 'blue', and the node at .* is of cluster 'green'"):
            Node.start(Config(attach=path, cluster="blue"))
        for named in (DEFAULT_CLUSTER, "green"):
            with Node.start(Config(attach=path, cluster=named)) as engine:
                assert [member.node_id for member in engine.members()] == ["green-1"]


def test_an_engine_takes_no_view_of_another_cluster_whose_node_has_its_nodes_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        clusters_node("green", tmp_path) as foreign,
        clusters_node("blue", tmp_path),
        Node.start(Config(attach=f"unix:{tmp_path}/blue/s")) as engine,
    ):
        engine._parts.following.follow(foreign.address)
        eventually(lambda: "of cluster 'green', this engine of cluster 'blue'" in caplog.text, 10.0)
        assert [member.node_id for member in engine.members()] == ["blue-1"]


def test_an_engine_is_not_attached_again_to_a_node_of_another_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    path, pages = f"unix:{tmp_path}/s", np.ones((2, 4096), np.uint8)
    first = clusters_node("blue", tmp_path, attach_listen=path)
    with Node.start(Config(attach=path)) as engine:
        engine.register_memory(pages)
        assert engine.publish(KEYS, pages, timeout=20.0).all()
        first.close()
        with clusters_node("green", tmp_path, attach_listen=path) as foreign:
            foreign.register_memory(pages)
            assert foreign.publish(KEYS, pages, timeout=20.0).all()
            eventually(lambda: "is of cluster 'green' now, and this engine's was 'blue'" in caplog.text, 20.0)
            assert not engine.exists(KEYS).any()
            assert engine.counters()["p2pkv_attached"] == 0
        with clusters_node("blue", tmp_path, attach_listen=path):
            eventually(lambda: engine.counters()["p2pkv_attached"] == 1, 20.0)
            assert engine.publish(KEYS, pages, timeout=20.0).all()


def test_what_an_engine_was_shown_goes_with_its_close_and_needs_no_collector(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"unix:{tmp_path}/s"
    with Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB")):
        gc.collect()
        gc.disable()
        try:
            engine, pages = Node.start(Config(attach=path)), np.ones((2, 4096), np.uint8)
            engine.register_memory(pages)
            assert engine.publish(KEYS, pages, timeout=20.0).all()
            assert engine.fetch(KEYS, pages, timeout=20.0).all()
            held = [weakref.ref(held) for held in (engine, engine._parts, engine._cache, pages)]
            engine.close()
            del engine, pages
            assert [ref() for ref in held] == [None] * len(held)
        finally:
            gc.enable()


def test_an_engine_says_nothing_for_a_while_after_a_bump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sketch has ids of before, which nobody asks for any more."""
    tmp_path.chmod(0o700)
    # A node that waits for a processor hears what is said all the same: else it counts with what is said next.
    monkeypatch.setattr("p2pkv.attach.finding._TELL_S", 20.0)
    path = f"unix:{tmp_path}/s"
    with (
        Node.start(Config(node_id="host", attach_listen=path, pool_size="1MiB", hot_share=0.25)) as host,
        Node.start(Config(attach=path)) as engine,
    ):
        own, now = engine._parts.finding, 0.0
        own.close()
        finding = Finding(own._own_host, own._finds, own._epoch_now, clock=lambda: now)

        def is_told() -> bool:
            counted = "p2pkv_attach_requests_total"
            before = host.counters()[counted]
            finding.turn()
            return host.counters()[counted] > before

        assert not is_told(), "nothing was found"
        rows = np.ones((2, 4096), np.uint8)
        engine.register_memory(rows)
        assert engine.publish(KEYS, rows, timeout=20.0).all()
        assert engine.fetch(KEYS, rows, timeout=20.0).all()
        ids = {bytes(key) for key in engine._cache.hash(KEYS)[1]}

        def are_heard() -> bool:
            assert is_told()
            heard = host._parts.caching.attach_host.finds(0.0, 9)
            return {key for _, found in heard for key, _, _ in found} == ids

        eventually(are_heard, 10.0)  # the node forgets what it was told three seconds ago
        engine.bump(timeout=20.0)
        assert not is_told()
        now += 19.0
        assert not is_told()
        now += 2.0
        assert is_told()


def test_an_engine_says_that_its_node_has_another_secret_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket asks for none, so it looks attached; its calls are over at once, and not at their deadlines."""
    monkeypatch.setattr("p2pkv.attach.following.SILENT_S", 0.5)
    tmp_path.chmod(0o700)
    secrets = [tmp_path / "before", tmp_path / "since"]
    for secret in secrets:
        secret.touch(mode=0o600)
        secret.write_text(f"the secret of this test, {secret.name}")
    path = f"unix:{tmp_path}/s"
    pages = np.ones((2, 4096), np.uint8)

    def host(secret: Path) -> Node:
        return Node.start(
            Config(node_id="host", attach_listen=path, pool_size="1MiB", secret_file=str(secret))
        )

    with host(secrets[0]):
        engine = Node.start(Config(attach=path, secret_file=str(secrets[0]), metrics_port=0))
        engine.register_memory(pages)
        assert engine.publish(KEYS, pages, timeout=20.0).all()
    with engine, host(secrets[1]):
        eventually(lambda: engine.counters()["p2pkv_attachments_total"] == 2, 20.0)
        assert not engine.publish(KEYS, pages, timeout=1.0).any()
        began = time.monotonic()
        assert not engine.publish(KEYS, pages, timeout=60.0).any()
        assert not engine.fetch(KEYS, pages, timeout=60.0).any()
        assert time.monotonic() - began < 30.0
        assert engine.counters()['p2pkv_missed_pages_total{reason="host"}'] == len(KEYS)
        eventually(lambda: engine.counters()["p2pkv_attached"] == 0, 20.0)
        eventually(lambda: "is secret_file the cluster's?" in caplog.text, 20.0)
        assert "the host's node lets this engine attach, and does not answer it at" in caplog.text
        with pytest.raises(HTTPError) as unready:
            urlopen(f"http://127.0.0.1:{engine.metrics_port}/readyz", timeout=20.0)
        assert b"is there and does not answer: nothing is published" in unready.value.read()
