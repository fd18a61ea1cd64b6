"""The indexer's answers: what requests may be, how names become keys, and which runs are counted."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2pkv import page_key
from p2pkv.directory.view import node_key
from p2pkv.indexer.indexer import MAX_KEYS, Indexer
from p2pkv.indexer.keying import Prefixed, chained
from p2pkv.indexer.refusal import Refusal
from p2pkv.indexer.registrations import MAX_REGISTRATIONS
from p2pkv.indexer.requests import MAX_HASHES
from p2pkv.integrations.vllm_connector.prefixes import Part
from p2pkv.page import HAS_DISK, LOCATION, RESIDENT, Keys, Namespace
from p2pkv_proxy.page_keys import Keying

NODES = ("n0", "n1", "n2")


class Directory:
    """What lies where, by key: node and whether it is in its pool."""

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[str, bool]] = {}
        self.n_looks = 0

    def look(self, keys: Keys, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        self.n_looks += 1
        found = np.zeros(len(keys), np.uint8)
        locations = np.zeros(len(keys), LOCATION)
        for at, key in enumerate(keys):
            if (entry := self.entries.get(key.tobytes())) is not None:
                found[at] = 1
                locations[at]["owner"] = node_key(entry[0])
                locations[at]["flags"] = RESIDENT | HAS_DISK if entry[1] else HAS_DISK
        locations[found == 0]["owner"] = node_key("n0")  # undefined where not found, and so never to be read
        return found, locations.view(np.uint8).reshape(-1, LOCATION.itemsize)


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def indexer(directory: Directory) -> Indexer:
    return made(directory)


def made(directory: Directory) -> Indexer:
    members: Any = [SimpleNamespace(node_id=name, key=node_key(name)) for name in NODES]
    return Indexer(directory.look, Namespace, lambda: members)


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def registered(**fields: object) -> bytes:
    return body(
        **{"instance_id": "e0", "modelname": "m", "block_size": 16, "dp_rank": 0, "type": "SGLang"} | fields
    )


def by_hash(**fields: object) -> bytes:
    return body(**{"model": "m", "block_size": 16} | fields)


def page_id(name: str) -> bytes:
    return page_key("space", name)


# --- runs


@given(
    st.lists(
        st.none() | st.tuples(st.sampled_from(NODES), st.booleans()),
        max_size=8,
    )
)
def test_runs_are_those_that_reading_block_by_block_finds(lies: list[tuple[str, bool] | None]) -> None:
    directory = Directory()
    names = [f"b{at}" for at in range(len(lies))]
    directory.entries = {
        page_id(name): each for name, each in zip(names, lies, strict=True) if each is not None
    }
    told: Any = made(directory).query_by_hash(by_hash(seq_hashes=[page_id(name).hex() for name in names]))
    assert set(told["default"]) == set(NODES)
    for node, said in told["default"].items():
        cpu = disk = external = 0
        for each in lies:
            if each is None:
                break
            cpu += external == cpu and each == (node, True)
            disk += external == disk and each[0] == node
            external += 1
        assert (said["CPU"], said["DISK"], said["EXTERNAL"]) == (16 * cpu, 16 * disk, 16 * external)
        assert (said["longest_matched"], said["DP"], said["GPU"]) == (16 * disk, {"0": 16 * disk}, 0)


def test_a_block_counts_if_all_its_parts_are_with_the_instances_nodes(
    indexer: Indexer, directory: Directory
) -> None:
    indexer.register(registered(namespace="space", key_prefixes=["r0/", "r1/"], node_ids=["n0", "n1"]))
    for name in ("r0/a", "r0/b"):
        directory.entries[page_id(name)] = ("n0", True)
    directory.entries[page_id("r1/a")] = ("n1", False)
    told: Any = indexer.query_by_hash(by_hash(seq_hashes=["a", "b"]))
    assert told["default"]["e0"] == {
        "longest_matched": 16,
        "GPU": 0,
        "DP": {"0": 16},
        "CPU": 0,
        "DISK": 16,
        "EXTERNAL": 16,
    }


def test_an_instance_has_what_the_best_of_its_ranks_has(indexer: Indexer, directory: Directory) -> None:
    for rank in (0, 1):
        indexer.register(registered(dp_rank=rank, namespace="space", node_ids=[f"n{rank}"]))
    directory.entries[page_id("a")] = ("n1", True)
    told: Any = indexer.query_by_hash(by_hash(seq_hashes=["a"]))
    assert (told["default"]["e0"]["CPU"], told["default"]["e0"]["DP"]) == (16, {"0": 0, "1": 16})
    assert directory.n_looks == 1, "both call their pages alike"


def test_dynamos_clients_are_answered_as_they_expect(indexer: Indexer, directory: Directory) -> None:
    indexer.register(body(instance_id=7, model_name="m", block_size=4, namespace="space", node_ids=["n2"]))
    directory.entries[page_id("a")] = ("n2", True)
    told = indexer.query_by_hash(body(model_name="m", block_hashes=["a", "b"]))
    assert told == {
        "scores": {},
        "frequencies": [],
        "tree_sizes": {},
        "instances": {
            "7": {"longest_matched": 4, "gpu": 0, "dp": {"0": 0}, "cpu": 4, "disk": 4, "external": 4}
        },
    }


# --- names


def test_the_prefix_of_vllms_parts_and_the_routers_chain_are_what_is_registered() -> None:
    digest = hashlib.sha256(b"a block").digest()
    prefix = Part(1, 0, "a layout").key(b"")
    assert Prefixed(Namespace("space"), "vLLM", raw=[prefix]).keys([digest.hex()]).tobytes() == page_key(
        "space", Part(1, 0, "a layout").key(digest)
    )
    assert chained(range(70), 16) == Keying("space", 16, "", "").keys(range(70))


def test_raw_prefixes_stand_before_the_hashes_bytes(indexer: Indexer, directory: Directory) -> None:
    indexer.register(registered(namespace="space", key_prefixes_hex=["302e302f"], node_ids=["n0"]))
    digest = hashlib.sha256(b"a block").digest()
    directory.entries[page_key("space", b"0.0/" + digest)] = ("n0", True)
    told: Any = indexer.query_by_hash(by_hash(seq_hashes=[digest.hex()]))
    assert told["default"]["e0"]["CPU"] == 16


def test_tokens_are_called_what_sglang_calls_them(indexer: Indexer, directory: Directory) -> None:
    indexer.register(registered(block_size=2, namespace="space", key_prefixes=["p/"], node_ids=["n0"]))
    first = hashlib.sha256(b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\x03\0\0\0\x04\x03\x02\x01").digest()
    tokens = [1, 2, 3, 0x01020304, 5]  # the last is no whole block
    assert chained(tokens, 2) == [first.hex(), second.hex()]
    for digest in (first, second):
        directory.entries[page_id(f"p/{digest.hex()}")] = ("n0", True)
    told: Any = indexer.query(body(model="m", block_size=2, token_ids=tokens))
    assert told["default"]["e0"]["CPU"] == 4


@pytest.mark.parametrize(
    ("registration", "question", "why"),
    [
        ({"type": "vLLM"}, {}, "type 'vLLM'"),
        ({"namespace": None}, {}, "no `namespace`"),
        ({"additionalsalt": "w8a8"}, {}, "salt 'w8a8'"),
        ({}, {"cache_salt": "tenant"}, "adapter or a salt"),
        ({}, {"lora_name": "sql"}, "adapter or a salt"),
    ],
)
def test_tokens_whose_names_are_not_known_are_refused(
    indexer: Indexer, registration: dict[str, object], question: dict[str, object], why: str
) -> None:
    indexer.register(registered(**{"namespace": "space"} | registration))
    with pytest.raises(Refusal, match=why) as refused:
        indexer.query(body(**{"model": "m", "token_ids": [1] * 16} | question))
    assert refused.value.status == 422


# --- what requests may be


@pytest.mark.parametrize(
    ("question", "status", "why"),
    [
        (b"[", 400, "the body is not"),
        (b"[" * 100000, 400, "the body is not"),
        (b"\xff", 400, "the body is not"),
        (by_hash(), 400, "there are 0"),
        (by_hash(seq_hashes=[], block_hash=[]), 400, "there are 2"),
        (by_hash(seq_hashes=[5]), 400, "hash 0 is a number"),
        (by_hash(seq_hashes=["00"]), 400, "page ids"),
        (by_hash(seq_hashes=["0 " * 16]), 400, "hexadecimal"),
        (by_hash(seq_hashes=["z" * 32]), 400, "hexadecimal"),
        (by_hash(seq_hashes=["é" * 32]), 400, "hexadecimal"),
        (by_hash(seq_hashes=["0" * 32] * (MAX_HASHES + 1)), 400, "length <= 8192"),
        (by_hash(seq_hashes=[], block_size=0), 400, ">= 1"),
        (by_hash(seq_hashes=[], model=""), 400, "0 names"),
        (by_hash(seq_hashes=[], model_name="other"), 400, "2 names"),
        (by_hash(seq_hashes=[], model="x" * 257), 400, "length <= 256"),
        (by_hash(seq_hashes=[], block_size=None), 404, "`block_size` is needed"),
        (by_hash(seq_hashes=[], instance_id="nobody"), 404, "no node is called 'nobody'"),
    ],
)
def test_what_is_no_question_is_refused_with_a_sentence(
    indexer: Indexer, question: bytes, status: int, why: str
) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        indexer.query_by_hash(question)
    assert refused.value.status == status
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"key_prefixes": ["a"]}, "`namespace`"),
        ({"namespace": "n", "key_prefixes": ["a"], "key_prefixes_hex": ["00"]}, "not both"),
        ({"namespace": "n", "key_prefixes_hex": ["0"]}, "two a byte"),
        ({"namespace": "n", "key_prefixes": []}, "length >= 1"),
        ({"instance_id": ""}, "instance_id"),
        ({"dp_rank": -1}, ">= 0"),
    ],
)
def test_what_is_no_registration_is_refused(indexer: Indexer, fields: dict[str, object], why: str) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        indexer.register(registered(**fields))
    assert refused.value.status == 400
    assert indexer.workers() == []


def test_scopes_keep_tenants_models_adapters_and_block_sizes_apart(indexer: Indexer) -> None:
    indexer.register(registered(namespace="space", tenant_id="t", lora_name="l"))
    there: Any = indexer.query_by_hash(by_hash(seq_hashes=["a"], tenant_id="t", lora_name="l"))
    assert set(there["t"]) == {"e0"}
    elsewhere: Any = indexer.query_by_hash(by_hash(seq_hashes=[], lora_name="l"))
    assert set(elsewhere["default"]) == set(NODES), "nobody is registered there: nodes answer for themselves"
    for other in ({"block_size": 32}, {"instance_id": "e1"}):
        with pytest.raises(Refusal) as refused:
            indexer.query_by_hash(by_hash(seq_hashes=[], **{"tenant_id": "t", "lora_name": "l"} | other))
        assert refused.value.status == 404


def test_registrations_are_replaced_forgotten_and_bounded(indexer: Indexer) -> None:
    indexer.register(registered(block_size=16))
    indexer.register(registered(block_size=32))
    assert [each["block_size"] for each in indexer.workers()] == [32]
    for rank in range(1, MAX_REGISTRATIONS):
        indexer.register(registered(dp_rank=rank))
    with pytest.raises(Refusal) as refused:
        indexer.register(registered(instance_id="e1"))
    assert refused.value.status == 507
    indexer.register(registered(dp_rank=5, block_size=8))
    gone: Any = indexer.unregister(body(instance_id="e0", modelname="m", dp_rank=5))
    assert gone["removed_instances"] == ["e0|default|5"]
    gone = indexer.unregister(body(instance_id="e0", modelname="m"))
    assert len(gone["removed_instances"]) == MAX_REGISTRATIONS - 1
    with pytest.raises(Refusal) as refused:
        indexer.unregister(body(instance_id="e0", modelname="m"))
    assert refused.value.status == 404


def test_a_question_that_would_look_too_much_up_is_refused(indexer: Indexer, directory: Directory) -> None:
    for rank in range(MAX_KEYS // MAX_HASHES + 1):
        indexer.register(registered(dp_rank=rank, namespace=f"space{rank}"))
    with pytest.raises(Refusal, match="`instance_id`"):
        indexer.query_by_hash(by_hash(seq_hashes=["a"] * MAX_HASHES))
    assert directory.n_looks == 0
