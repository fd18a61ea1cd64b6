"""What is understood of the KV hints that engines carry, and what is left out with a word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pkv.errors import UsageError
from p2pkv.integrations.kv_hints import MAX_ACTIONS, MAX_RETAINED_S, Hints, Retain, read_hints


class KvHintAction(msgspec.Struct, frozen=True):
    """As vLLM 0.32.0 has it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHintsEnvelope(msgspec.Struct, frozen=True):
    """As vLLM 0.32.0 has it."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


def envelope(
    *actions: tuple[str, dict[str, Any]], version: str = "1.0", protocol: str = "0.1"
) -> dict[str, Any]:
    return {
        "protocol_version": protocol,
        "message_id": "m",
        "actions": [
            {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
            for i, (kind, payload) in enumerate(actions)
        ],
    }


def test_a_fetch_as_dynamo_sends_it_brings_the_prompt() -> None:
    payload = {"source_control_endpoint": "tcp://127.0.0.1:23280", "block_hashes": [11, 22]}
    assert read_hints(envelope(("kv.fetch", payload))) == Hints(brings=True)


def test_an_engines_own_object_is_read_as_a_mapping_is() -> None:
    action = KvHintAction("a", "kv.retain", "1.0", {"ttl_seconds": 2.5})
    assert read_hints(KvHintsEnvelope("0.1", "m", [action])) == Hints(retains=(Retain(0, None, 2.5),))


def test_parts_are_retained_for_their_times() -> None:
    directives = [{"start": 0, "end": 32, "priority": 80, "duration": 60}, {"start": 32, "duration": 1e9}]
    hints = read_hints(envelope(("kv.pin", {"scope": "alice", "directives": directives})))
    assert hints.retains == (Retain(0, 32, 60.0), Retain(32, None, MAX_RETAINED_S))


def test_shares_name_nodes_once() -> None:
    hints = read_hints(envelope(("kv.share", {"target_node_ids": ["b", "c", "b"]}), ("kv.evict", {})))
    assert hints == Hints(shares=("b", "c"), lets_go=True)
    assert hints
    assert not read_hints(envelope())


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        ("kv.future", {}, "kv.future: is not known here"),
        ("kv.retain", {}, "kv.retain: ttl_seconds is a number of seconds, not None"),
        ("kv.retain", {"ttl_seconds": True}, "kv.retain: ttl_seconds is a number of seconds, not True"),
        ("kv.retain", {"ttl_seconds": 0}, "kv.retain: ttl_seconds is above 0 and finite, not 0"),
        ("kv.retain", {"ttl_seconds": float("nan")}, "kv.retain: ttl_seconds is above 0 and finite, not nan"),
        ("kv.retain", {"directives": {}}, "kv.retain: directives are a list"),
        ("kv.retain", {"directives": ["x"]}, "kv.retain: a directive is an object, not 'x'"),
        (
            "kv.retain",
            {"directives": [{"start": 16, "end": 16, "duration": 1}]},
            "kv.retain: tokens 16 to 16 are no range",
        ),
        ("kv.share", {"target_node_ids": "b"}, "kv.share: target_node_ids is a list of node ids, not 'b'"),
    ],
)
def test_what_cannot_be_followed_is_left_out_alone(kind: str, payload: dict[str, Any], why: str) -> None:
    hints = read_hints(envelope((kind, payload), ("kv.prefetch", {})))
    assert hints.brings
    assert hints.ignored == (why,)


def test_a_number_that_is_no_float_is_left_out() -> None:
    hints = read_hints(envelope(("kv.retain", {"ttl_seconds": 10**400})))
    assert not hints
    assert "above 0 and finite" in hints.ignored[0]


def test_versions_that_are_not_known_are_left_out() -> None:
    assert read_hints(envelope(("kv.fetch", {}), version="2.0")).ignored == (
        "kv.fetch: version '2.0' is not known here",
    )
    assert not read_hints(envelope(("kv.fetch", {}), protocol="2.0")).brings


def test_actions_are_bounded() -> None:
    many = envelope(*[("kv.future", {})] * MAX_ACTIONS, ("kv.fetch", {}))
    hints = read_hints(many)
    assert not hints.brings
    assert f"more than {MAX_ACTIONS} actions" in hints.ignored


@pytest.mark.parametrize(
    "wrong", [None, 7, "x", [], {}, {"protocol_version": "0.1", "message_id": 7, "actions": []}]
)
def test_what_is_no_envelope_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="these KV hints are no envelope of them: "):
        read_hints(wrong)
