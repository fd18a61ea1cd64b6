"""The indexer as nodes serve it: questions over HTTP, who may ask, and what bounds who asks too much."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from cluster import eventually
from p2pkv import Config, ConfigError, Node, page_key
from p2pkv.bounded_server import MAX_CONNECTIONS
from p2pkv.indexer.server import MAX_BODY
from pair import N, Pair

TOKEN = "a-token-of-a-test.0123"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, indexer="127.0.0.1:0")
    yield pair
    pair.close()


def port_of(node: Node) -> int:
    assert node.indexer_port is not None
    return node.indexer_port


def ask(node: Node, path: str, told: object = None, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port_of(node), timeout=10)
    try:
        method, sent = ("GET", None) if told is None else ("POST", json.dumps(told))
        connection.request(method, path, sent, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def held(node: Node, keys: list[str]) -> Any:
    hashes = [page_key("default", key, node.epoch).hex() for key in keys]
    status, told = ask(node, "/query_by_hash", {"model": "m", "block_size": 16, "seq_hashes": hashes})
    assert status == 200, told
    return told["default"]


def test_any_node_says_who_has_the_leading_run(pair: Pair) -> None:
    keys = pair.publish()
    for node in pair.nodes:
        told = held(node, [*keys, "never published"])
        assert {name: each["CPU"] for name, each in told.items()} == {"owner": 16 * N, "reader": 0}
        assert told["reader"]["EXTERNAL"] == 16 * N
    pair.owner.retract(keys[3:])
    for node in pair.nodes:
        eventually(lambda node=node: held(node, keys)["owner"]["CPU"] == 16 * 3, 10.0)
    pair.owner.bump()
    assert {each["EXTERNAL"] for each in held(pair.owner, keys).values()} == {0}


def test_what_is_on_a_disk_only_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # or what earlier runs have left would be there, too
    settings = {"indexer": "127.0.0.1:0", "pool_size": 65536, "disk_size": 8 << 20, "buffer_size": 0}
    pair = Pair(tmp_path, **settings, disk_path=None)
    try:
        first = pair.publish()
        # what the pool evicts before it was written is on no disk
        eventually(lambda: pair.owner.counters()["p2pkv_disk_stored_pages_total"] == N, 10.0)
        for _ in range(3):  # which have no room beside it
            pair.publish()
        eventually(lambda: held(pair.reader, first)["owner"] | {"DP": 0} == held_on_disk(), 10.0)
    finally:
        pair.close()


def held_on_disk() -> dict[str, int]:
    there = 16 * N
    return {"longest_matched": there, "GPU": 0, "DP": 0, "CPU": 0, "DISK": there, "EXTERNAL": there}


def test_an_instance_that_is_registered_is_answered_for_and_counted(pair: Pair) -> None:
    keys = pair.publish()
    told = {"instance_id": "vllm-0", "modelname": "m", "block_size": 16, "dp_rank": 0, "type": "vLLM"}
    more = {"endpoint": "tcp://127.0.0.1:5557", "namespace": "default", "node_ids": ["owner"]}
    assert ask(pair.reader, "/register", told | more) == (
        200,
        {"status": "registered successfully", "instance_id": "vllm-0"},
    )
    status, answer = ask(pair.reader, "/query_by_hash", {"model": "m", "seq_hashes": keys})
    assert (status, answer["default"]["vllm-0"]["CPU"]) == (200, 16 * N)
    assert [each["instance_id"] for each in ask(pair.reader, "/workers")[1]] == ["vllm-0"]
    assert ask(pair.reader, "/query", {"model": "m", "token_ids": [1] * 16})[0] == 422
    assert ask(pair.reader, "/unregister", told)[1]["removed_instances"] == ["vllm-0|default|0"]
    counters = pair.reader.counters()
    assert counters['p2pkv_indexer_requests_total{outcome="answered"}'] == 4
    assert counters['p2pkv_indexer_requests_total{outcome="refused"}'] == 1


@pytest.mark.parametrize(
    ("path", "told", "status"),
    [
        ("/", None, 404),
        ("/query", None, 405),
        ("/health", {}, 405),
        ("/query", [], 400),
        ("/health", None, 200),
    ],
)
def test_what_is_not_there_is_said_to_be_so(pair: Pair, path: str, told: object, status: int) -> None:
    assert ask(pair.owner, path, told)[0] == status


def test_on_loopback_no_web_page_is_answered(pair: Pair) -> None:
    assert ask(pair.owner, "/health", Host="evil.example")[0] == 403
    assert ask(pair.owner, "/register", {}, Origin="http://evil.example")[0] == 403


def test_with_a_token_only_who_has_it_is_answered(tmp_path: Path) -> None:
    pair = Pair(tmp_path, indexer="127.0.0.1:0", indexer_token=TOKEN)
    try:
        assert ask(pair.owner, "/health")[0] == 401
        assert ask(pair.owner, "/health", Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert ask(pair.owner, "/health", Authorization=f"Bearer {TOKEN}")[0] == 200
    finally:
        pair.close()


def test_settings_that_would_show_pages_to_strangers_are_refused() -> None:
    with pytest.raises(ConfigError, match="indexer_token"):
        Config(indexer="0.0.0.0:9000")
    with pytest.raises(ConfigError, match="indexer_token"):
        Config(indexer_token="short")
    with pytest.raises(ConfigError, match="no directory"):
        Config(indexer="127.0.0.1:0", pool_size=0)
    with pytest.raises(ConfigError, match="data_ports"):
        Config(indexer="127.0.0.1:7501", data_ports="7500-7510")
    assert TOKEN not in repr(Config(indexer="0.0.0.0:9000", indexer_token=TOKEN))


def raw(node: Node, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(node)), 10) as connection:
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("heads", "status"),
    [
        (f"Content-Length: {MAX_BODY + 1}", b" 413 "),
        ("Content-Length: " + "9" * 4000, b" 413 "),
        ("Content-Length: -1", b" 400 "),
        ("Content-Length: 1\r\nContent-Length: 2", b" 400 "),
        ("Transfer-Encoding: chunked", b" 411 "),
        ("Content-Length: 5", b""),  # and then nothing
    ],
)
def test_a_body_that_is_too_long_or_has_no_length_ends_the_connection(
    pair: Pair, heads: str, status: bytes
) -> None:
    told = raw(pair.owner, f"POST /query HTTP/1.1\r\nHost: localhost\r\n{heads}\r\n\r\n")
    assert status in told.partition(b"\r\n")[0]
    assert told.count(b"HTTP/1.1") <= 1
    assert ask(pair.owner, "/health")[0] == 200


def test_who_connects_and_says_nothing_keeps_nobody_out(pair: Pair) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", port_of(pair.owner)), 10) for _ in range(3 * MAX_CONNECTIONS)
    ]
    try:
        assert ask(pair.owner, "/health")[0] == 200
        serving = [t for t in threading.enumerate() if t.name == "p2pkv-indexer-connection"]
        eventually(lambda: sum(t.is_alive() for t in serving) <= MAX_CONNECTIONS + 1, 10.0)
    finally:
        for connection in silent:
            connection.close()


def test_closing_a_node_ends_its_connections(pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", port_of(pair.owner)), 10) as connection:
        assert ask(pair.owner, "/health")[0] == 200
        pair.owner.close()
        assert connection.recv(1) == b""
    assert not [t for t in threading.enumerate() if t.name.startswith("p2pkv-indexer-connection")]


def test_its_description_has_every_path_and_what_bodies_may_have(pair: Pair) -> None:
    status, told = ask(pair.owner, "/openapi.json")
    assert status == 200
    assert told["openapi"].startswith("3.1")
    refused, there = ask(pair.owner, "/nowhere")
    assert refused == 404
    assert set(there["error"].removeprefix("there is ").split(", ")) == set(told["paths"])
    for path, operations in told["paths"].items():
        (method,) = operations
        other = ask(pair.owner, path, {} if method == "get" else None)
        assert other[0] == 405, f"{path} takes {method} alone"
        if method == "post":
            content = operations[method]["requestBody"]["content"]["application/json"]
            schema = told["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            assert "model" in schema["properties"]
    assert "security" not in told
