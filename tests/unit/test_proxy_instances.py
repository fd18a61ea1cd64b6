"""What the router believes of its instances: heartbeats, expiry, breakers."""

from __future__ import annotations

import msgspec
import pytest

from p2pkv._native import Patience
from p2pkv.errors import ConfigError, ControlError, VersionError
from p2pkv.instances.heartbeat import (
    Heartbeat,
    Instance,
    Mode,
    Role,
    State,
    checked,
    pack,
    unpack,
)
from p2pkv_proxy.breaker import FAILURES, FIRST_PAUSE_S, Breaker, Phase
from p2pkv_proxy.listing import list_all, parse_instance
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Registry


def instance(name: str, role: Role = Role.DECODE, **more: object) -> Instance:
    return checked(Instance(url=f"http://127.0.0.1:{1000 + len(name)}", id=name, role=role, **more))  # type: ignore[arg-type]


def beat(name: str, sequence: int, state: State = State.READY, boot: int = 1, running: int = 0) -> Heartbeat:
    return Heartbeat(instance=instance(name), boot=boot, sequence=sequence, state=state, running=running)


def prompt(text: str) -> Prompt:
    return Prompt("", [text], None, is_stream=False, max_tokens=8, n_tokens=len(text) // 4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_instance_that_falls_silent_is_removed_on_time_though_others_say_nothing() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    registry.note_heartbeat(beat("a", 1))
    interrupted = []
    tracked = registry.get("a")
    assert tracked is not None
    tracked.begin(5, clock.now, lambda: interrupted.append("a"))
    clock.now += 9.9
    registry.expire()
    assert registry.get("a") is not None
    clock.now += 0.1
    registry.expire()
    assert registry.get("a") is None
    assert interrupted == ["a"]


def test_late_and_repeated_heartbeats_change_nothing() -> None:
    registry = Registry()
    registry.note_heartbeat(beat("a", 5, State.DRAINING))
    for late in (beat("a", 5), beat("a", 4), beat("a", 9, boot=0)):
        registry.note_heartbeat(late)
    tracked = registry.get("a")
    assert tracked is not None
    assert tracked.state is State.DRAINING
    assert registry.refused == 3
    registry.note_heartbeat(beat("a", 1, boot=2))
    assert tracked.state is State.READY


def test_only_requests_that_are_not_the_routers_own_count_as_others() -> None:
    registry = Registry()
    registry.note_heartbeat(beat("a", 1))
    tracked = registry.get("a")
    assert tracked is not None
    attempts = [tracked.begin(1000, 0.0, lambda: None) for _ in range(2)]
    registry.note_heartbeat(beat("a", 2, running=3))
    assert (tracked.busy, tracked.weight) == (3, 3000.0)
    for attempt in attempts:
        tracked.end(attempt, 1.0)
    assert tracked.busy == 1  # the report is old, but two of the three were ours
    registry.note_heartbeat(beat("a", 3, running=0))
    assert (tracked.busy, tracked.weight) == (0, 0.0)


def test_a_good_bye_removes_and_unanswered_requests_of_a_failing_one_go_elsewhere() -> None:
    registry = Registry()
    registry.note_heartbeat(beat("a", 1))
    tracked = registry.get("a")
    assert tracked is not None
    interrupted: list[int] = []
    answered = tracked.begin(1, 0.0, lambda: interrupted.append(1))
    tracked.begin(1, 0.0, lambda: interrupted.append(2))
    tracked.answered(answered, 0.0)
    registry.note_heartbeat(beat("a", 2, State.FAILING))
    assert interrupted == [2]
    registry.note_heartbeat(beat("b", 1))
    registry.note_heartbeat(beat("b", 2, State.LEFT))
    assert registry.get("b") is None


def test_what_an_instance_has_when_it_says_good_bye_it_may_finish() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=lambda: clock.now)
    registry.note_heartbeat(beat("a", 1))
    tracked = registry.get("a")
    assert tracked is not None
    interrupted: list[str] = []
    attempt = tracked.begin(5, clock.now, lambda: interrupted.append("a"))
    registry.note_heartbeat(beat("a", 2, State.LEFT))
    clock.now += 500.0  # a long answer, of an engine that ends when it has given it
    registry.expire()
    assert tracked.state is State.LEFT
    assert interrupted == []
    tracked.end(attempt, clock.now)
    registry.expire()
    registry.expire()
    assert registry.get("a") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://x:1"},
        {"url": "https://x"},
        {"url": "http://x"},
        {"url": "http://user@x:1"},
        {"url": "http://x:1/path"},
        {"url": "http://x:1", "bootstrap_port": 70000},
        {"url": "http://x:1", "capacity": -1},
        {"url": "http://x:1", "model": "a\nb"},
        {"url": "http://x:1", "mode": Mode.VLLM_ADDRESSES},
    ],
)
def test_an_instance_that_can_not_be_one_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        checked(Instance(role=Role.DECODE, **fields))  # type: ignore[arg-type]


def test_heartbeats_are_read_back_and_nonsense_is_not() -> None:
    heartbeat = beat("a", 7, running=3)
    assert unpack(pack(heartbeat)) == heartbeat
    for nonsense in (b"", b"\xc1", b"\x80", pack(heartbeat)[:-1], pack(beat("a", -1))):
        with pytest.raises(ControlError):
            unpack(nonsense)
    with pytest.raises(VersionError, match="version 9"):
        unpack(pack(Heartbeat(instance=instance("a"), boot=1, sequence=1, state=State.READY, version=9)))


def test_instances_are_listed_and_unlisted_as_the_operator_names_them() -> None:
    registry = Registry()
    a, b, c = (parse_instance(f"http://{name}:1", Role.BOTH, Mode.VLLM) for name in "abc")
    moved = parse_instance("http://elsewhere:1,id=b:1", Role.BOTH, Mode.VLLM)
    list_all(registry, {}, {a.id: a, b.id: b})
    list_all(registry, {a.id: a, b.id: b}, {b.id: moved, c.id: c})
    registry.expire()
    assert {tracked.id: tracked.instance for tracked in registry} == {b.id: moved, c.id: c}


def test_an_instance_is_read_as_its_fields_are() -> None:
    with pytest.raises(ConfigError, match="colour"):
        parse_instance("http://a:1,colour=red", Role.DECODE, Mode.VLLM)
    named = parse_instance("http://a:1,bootstrap_port=8998,id=0", Role.PREFILL, Mode.SGLANG)
    assert (named.bootstrap_port, named.id) == (8998, "0")


def test_a_breaker_opens_lets_one_through_and_closes_again() -> None:
    breaker = Breaker()
    attempts = [object() for _ in range(FAILURES)]
    for attempt in attempts:
        assert breaker.allows(0.0)
        breaker.begin(attempt)
        breaker.failed(attempt, 0.0)
    assert breaker.phase is Phase.OPEN
    assert not breaker.allows(FIRST_PAUSE_S / 2)
    assert breaker.allows(FIRST_PAUSE_S)
    trial, old = object(), attempts[0]
    breaker.begin(trial)
    assert not breaker.allows(FIRST_PAUSE_S)
    breaker.succeeded(old, FIRST_PAUSE_S)  # began before: says nothing
    breaker.failed(trial, FIRST_PAUSE_S)
    assert not breaker.allows(2 * FIRST_PAUSE_S)
    assert breaker.allows(4 * FIRST_PAUSE_S)
    breaker.begin(trial)
    breaker.succeeded(trial, FIRST_PAUSE_S)
    assert breaker.phase is Phase.CLOSED


def test_silence_ends_no_answer_that_has_begun() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    registry.note_heartbeat(beat("a", 1))
    tracked = registry.get("a")
    assert tracked is not None
    interrupted: list[str] = []
    begun = tracked.begin(5, clock.now, lambda: interrupted.append("begun"))
    tracked.begin(5, clock.now, lambda: interrupted.append("waiting"))
    tracked.answered(begun, 0.0)
    clock.now += 10.0
    registry.expire()
    assert interrupted == ["waiting"]
    assert registry.get("a") is None
    tracked.completed(begun, clock.now)
    tracked.end(begun, clock.now)


def test_what_has_begun_waits_less_for_an_instance_whose_health_check_fails() -> None:
    registry = Registry()
    registry.list_instance(instance("a"))
    registry.note_probe("a", is_healthy=True)
    tracked = registry.get("a")
    assert tracked is not None
    patience = Patience(120.0, 20.0)
    begun = tracked.begin(5, 0.0, lambda: None, patience=patience)
    tracked.answered(begun, 0.0)
    assert patience.now == 120.0
    registry.note_probe("a", is_healthy=False)
    assert patience.now == 20.0
    late = Patience(120.0, 20.0)
    tracked.begin(5, 0.0, lambda: None, patience=late)
    registry.note_probe("a", is_healthy=False)
    assert late.now == 20.0
    registry.note_probe("a", is_healthy=True)
    assert patience.now == late.now == 120.0
    registry.note_heartbeat(beat("a", 1, State.FAILING))
    assert patience.now == 20.0


def test_who_is_not_heard_is_asked_for_its_health_while_it_answers() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    registry.note_heartbeat(beat("silent", 1))
    registry.note_heartbeat(beat("left", 1))
    assert registry.probed == []
    begun = {}
    for tracked in registry:
        begun[tracked] = tracked.begin(5, clock.now, lambda: None)
        tracked.answered(begun[tracked], clock.now)
    assert registry.probed == []
    registry.note_heartbeat(beat("left", 2, State.LEFT))
    clock.now += 11.0
    registry.expire()
    assert [tracked.id for tracked in registry.probed] == ["left", "silent"]
    for tracked, attempt in begun.items():
        tracked.end(attempt, clock.now)
    assert registry.probed == []


def test_time_in_which_nobody_listened_counts_against_nobody() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    registry.note_heartbeat(beat("a", 1))
    clock.now += 13.0  # stopped, say; the timer comes before what has arrived meanwhile
    registry.expire(late=12.75)
    assert registry.get("a") is not None
    registry.note_heartbeat(beat("a", 2))
    clock.now += 9.9
    registry.expire()
    assert registry.get("a") is not None
    clock.now += 0.2
    registry.expire()
    assert registry.get("a") is None


def test_a_listed_instance_stays_listed_whatever_its_heartbeats_say_and_when_they_end() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    entry = instance("a")
    registry.list_instance(entry)
    registry.note_probe("a", is_healthy=True)
    tracked = registry.get("a")
    assert tracked is not None
    interrupted: list[str] = []
    tracked.begin(5, clock.now, lambda: interrupted.append("a"))
    more = msgspec.structs.replace(entry, model="m", node_id="n")
    registry.note_heartbeat(Heartbeat(instance=more, boot=1, sequence=1, state=State.DRAINING))
    assert registry.get("a") is tracked
    assert tracked.is_listed
    assert tracked.instance == more
    registry.note_probe("a", is_healthy=True)
    assert tracked.state is State.DRAINING  # it is well, and takes nothing new
    registry.list_instance(entry)  # its file was read again
    assert registry.get("a") is tracked
    registry.note_probe("a", is_healthy=False)
    assert tracked.state is State.FAILING
    assert interrupted == ["a"]
    clock.now += 11.0
    registry.expire()
    assert registry.get("a") is tracked
    registry.note_probe("a", is_healthy=True)
    assert tracked.state is State.READY


def test_an_instance_is_not_ready_while_its_health_check_fails_whatever_it_says() -> None:
    registry = Registry()
    registry.list_instance(instance("a"))
    registry.note_probe("a", is_healthy=True)
    tracked = registry.get("a")
    assert tracked is not None
    registry.note_heartbeat(beat("a", 1))
    registry.note_probe("a", is_healthy=False)
    for sequence in range(2, 5):
        registry.note_heartbeat(beat("a", sequence))
        assert tracked.state is State.FAILING
    assert [event.text for event in registry.events].count("it is failing") == 1
    registry.note_heartbeat(beat("a", 5, State.DRAINING))
    assert tracked.state is State.DRAINING
    registry.note_probe("a", is_healthy=True)
    registry.note_heartbeat(beat("a", 6))
    assert tracked.state is State.READY


def test_what_waits_where_something_fails_is_told_when_another_one_is_ready() -> None:
    clock = Clock()
    registry = Registry(lifetime=10.0, now=clock)
    interrupted: list[str] = []
    for name in ("failing", "left", "silent"):
        registry.note_heartbeat(beat(name, 1))
        tracked = registry.get(name)
        assert tracked is not None
        tracked.begin(5, clock.now, lambda name=name: interrupted.append(name))  # type: ignore[misc]
    clock.now += 11.0
    registry.note_heartbeat(beat("failing", 2, State.FAILING))
    registry.note_heartbeat(beat("left", 2, State.LEFT))
    registry.expire()
    assert interrupted == ["failing", "silent"]  # and nobody else could do it
    registry.note_heartbeat(beat("silent", 2))
    assert interrupted[2:] == ["failing"]  # who is heard again has what it had
    registry.note_heartbeat(beat("other", 1))
    assert interrupted[3:] == ["failing", "silent"]


def test_a_listed_instance_is_what_the_operator_says_it_is(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.list_instance(instance("a"))
    registry.note_probe("a", is_healthy=True)
    tracked = registry.get("a")
    assert tracked is not None
    other = instance("a", Role.PREFILL)
    for sequence in range(3):
        registry.note_heartbeat(Heartbeat(instance=other, boot=1, sequence=sequence, state=State.DRAINING))
    assert registry.get("a") is tracked
    assert (tracked.instance.role, tracked.state) == (Role.DECODE, State.READY)
    assert registry.refused == 3
    assert caplog.text.count("its heartbeats are not taken") == 1


@pytest.mark.parametrize(
    ("there", "serves", "serves_strictly"),
    [
        ([], False, False),
        ([(Role.PREFILL, Mode.VLLM)], False, False),
        ([(Role.DECODE, Mode.VLLM)], True, False),
        ([(Role.DECODE, Mode.SGLANG)], False, False),
        ([(Role.DECODE, Mode.SGLANG), (Role.PREFILL, Mode.VLLM)], False, False),
        ([(Role.DECODE, Mode.SGLANG), (Role.PREFILL, Mode.SGLANG)], True, True),
        ([(Role.BOTH, Mode.SGLANG)], True, True),
    ],
)
def test_a_router_is_well_while_somebody_would_serve_a_request(
    there: list[tuple[Role, Mode]], serves: bool, serves_strictly: bool
) -> None:
    registry = Registry()
    for n, (role, mode) in enumerate(there):
        one = instance("n" * (n + 1), role, mode=mode, bootstrap_port=9 if mode is Mode.SGLANG else None)
        registry.note_heartbeat(Heartbeat(instance=one, boot=1, sequence=1, state=State.READY))
    assert registry.can_serve(strict_pd=False) is serves
    assert registry.can_serve(strict_pd=True) is serves_strictly
