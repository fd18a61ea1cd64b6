"""The cluster view and its wire form."""

from pathlib import Path

import msgspec
import pytest

from p2pkv.directory.view import (
    MAX_MEMBERS,
    VIEW_VERSION,
    Member,
    State,
    View,
    decode,
    encode,
    flaw,
    node_key,
)
from p2pkv.errors import VersionError, ViewError

GOLDEN = Path(__file__).parent.parent / "golden" / "view-v1.bin"

A = Member("a", 10, "host-a:7000", transports={"shm": "boot1/net1", "tcp": "net"}, weight=2.0)
B = Member("b", 11, "[::1]:7001", incarnation=3, state=State.SUSPECT)
C = Member("c", 12, "10.0.0.1:7002", incarnation=2**62, state=State.DEAD)


def wire(**changes):
    record = {
        "id": "a",
        "boot": 1,
        "incarnation": 0,
        "address": "h:1",
        "state": 0,
        "transports": {"tcp": "net"},
        "weight": 1.0,
    }
    return {"version": VIEW_VERSION, "sender": "a", "members": [{**record, **changes}]}


def test_a_node_key_is_the_first_8_bytes_of_blake2b():
    # what `printf node-1 | b2sum` begins with
    assert node_key("node-1") == int.from_bytes(bytes.fromhex("872addf2c5a1ff67"), "little")


def test_a_view_looks_members_up_by_id_and_by_key():
    view = View([A, B, C])
    assert view["b"] is B
    assert view.by_key(node_key("c")) is C
    assert view.by_key(node_key("nobody")) is None
    assert view.alive() == (A,)
    assert view.present() == (A, B)
    assert "a alive" in repr(view)


def test_a_node_that_drains_is_said_to_and_others_cost_no_byte():
    draining = Member("a", 10, "host-a:7000", weight=0.0, is_draining=True)
    assert decode(encode("b", [draining])).members == (draining,)
    assert b"draining" not in encode("b", [A, B, C])
    assert decode(msgspec.msgpack.encode(wire(draining=True))).members[0].is_draining
    with pytest.raises(ViewError):
        decode(msgspec.msgpack.encode(wire(draining="yes")))


def test_the_digest_does_not_depend_on_the_order():
    assert View([A, B, C]).digest == View([C, B, A]).digest


@pytest.mark.parametrize(
    "other",
    [
        Member("aa", 10, "host-a:7000"),
        Member("a", 11, "host-a:7000"),
        Member("a", 10, "host-a:7000", incarnation=1),
        Member("a", 10, "host-a:7000", state=State.DEAD),
        Member("a", 10, "host-b:7000"),
    ],
)
def test_the_digest_tells_apart(other):
    assert View([other]).digest != View([A]).digest


def test_forgetting_the_dead_leaves_the_digest():
    assert View([A, C]).digest == View([A]).digest


def test_precedence_is_boot_then_incarnation_then_state():
    worst_first = [
        Member("a", 1, "h:1", incarnation=9, state=State.DEAD),
        Member("a", 2, "h:1", state=State.ALIVE),
        Member("a", 2, "h:1", state=State.SUSPECT),
        Member("a", 2, "h:1", state=State.DEAD),
        Member("a", 2, "h:1", state=State.LEFT),
        Member("a", 2, "h:1", incarnation=1, state=State.ALIVE),
    ]
    assert sorted(worst_first, key=lambda member: member.precedence) == worst_first


def test_a_view_survives_the_wire():
    report = decode(encode("a", [A, B, C]))
    assert report.sender == "a"
    assert report.members == (A, B, C)


def test_the_released_format_is_still_read_and_written():
    assert decode(GOLDEN.read_bytes()).members == (A, B, C)
    assert encode("a", [A, B, C]) == GOLDEN.read_bytes()


def test_a_full_view_fits():
    members = [Member(f"node-{i}", i, f"host-{i}:7000") for i in range(MAX_MEMBERS)]
    assert len(decode(encode("node-0", members)).members) == MAX_MEMBERS


def test_unknown_fields_are_ignored():
    content = wire(colour="red")
    content["future"] = [1, 2]
    assert decode(msgspec.msgpack.encode(content)).members[0].node_id == "a"


def test_an_unknown_version_is_refused_with_both_numbers():
    blob = msgspec.msgpack.encode({"version": 7, "other": "layout"})
    with pytest.raises(VersionError, match=r"version 7.*reads 1"):
        decode(blob)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"id": "x" * 129},
        {"id": "ä" * 65},
        {"id": "a\nb"},
        {"id": "a\0"},
        {"id": 7},
        {"boot": -1},
        {"boot": 2**63},
        {"incarnation": 2**63},
        {"incarnation": "1"},
        {"address": "nowhere"},
        {"address": ":7000"},
        {"address": "h:0"},
        {"address": "h:65536"},
        {"address": "h:²"},
        {"address": "h" * 300 + ":1"},
        {"state": 4},
        {"state": -1},
        {"transports": {f"t{i}": "d" for i in range(17)}},
        {"transports": {"tcp": "d" * 129}},
        {"transports": {"": "d"}},
        {"transports": None},
        {"weight": -0.5},
        {"weight": 17.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
    ],
)
def test_a_malformed_record_is_refused(changes):
    with pytest.raises(ViewError):
        decode(msgspec.msgpack.encode(wire(**changes)))


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"version": "1"},
        {"version": 1},
        {"version": 1, "sender": "a"},
        {"version": 1, "sender": "", "members": []},
        {"version": 1, "sender": "a", "members": {}},
        {"version": 1, "sender": "a", "members": [1]},
        {"version": 1, "sender": "a", "members": [wire()["members"][0]] * 2},
        {
            "version": 1,
            "sender": "a",
            "members": [{**wire()["members"][0], "id": str(i)} for i in range(MAX_MEMBERS + 1)],
        },
    ],
)
def test_a_malformed_view_is_refused(content):
    with pytest.raises(ViewError):
        decode(msgspec.msgpack.encode(content))


def test_a_huge_blob_is_refused_unread():
    with pytest.raises(ViewError, match="at most"):
        decode(b"\0" * (16 << 20) + b"\0")


def test_text_that_is_not_utf8_is_refused():
    blob = encode("a", [A]).replace(b"host-a:7000", b"host-\xff:7000")
    with pytest.raises(ViewError):
        decode(blob)


def test_a_flaw_names_the_limit():
    assert flaw(A) is None
    assert "128 bytes" in str(flaw(Member("", 1, "h:1")))
