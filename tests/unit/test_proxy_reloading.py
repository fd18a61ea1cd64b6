"""Files that are read again: what is new in them holds within a second, what can't be used changes nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fake_answers import tokens_of
from fake_engines import FakeEngine
from front import COMPLETION, Front, joined, run, until
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy import cli
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Files, Plan
from p2pkv_proxy.reloading import Reloading, loaded
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.settings_file import AT_START, RELOADABLE, read_settings
from rig import Rig


def plan_of(path: Path, **options: Any) -> Plan:
    return Plan(settings=Settings(**options), files=Files(settings=path))


async def start(rig: Rig, engines: list[FakeEngine], files: Files, **settings: Any) -> Front:
    import aiohttp

    app = App(loaded(Plan(settings=Settings(**settings), files=files)))
    listening = await rig.router(app)
    front = Front(listening, app, await rig.enter_async_context(aiohttp.ClientSession()))
    await until(lambda: {t.id for t in app.registry if t.state.value == "ready"} == ids(engines))
    return front


def ids(engines: list[FakeEngine]) -> set[str]:
    return {engine.instance.id for engine in engines}


def list_in(path: Path, engines: list[FakeEngine]) -> Path:
    entries = [{"url": engine.instance.url, "role": engine.role.value} for engine in engines]
    path.write_text(json.dumps(entries))
    return path


def test_every_option_is_reloadable_in_a_file_of_its_own_or_known_to_stay() -> None:
    options = set(inspect.signature(cli.proxy).parameters)
    files = {field.name for field in fields(Files)}
    assert options == RELOADABLE - {"tenants"} | AT_START | files
    assert not RELOADABLE & AT_START


def test_a_file_counts_in_place_of_options_and_what_it_no_longer_says_is_theirs_again(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    told = {"attempts": 5, "policy": "predicted", "max_body": "2MiB", "tenants": {"team-a": {"priority": -1}}}
    path.write_text(json.dumps(told))
    plan = read_settings(path, plan_of(path, attempts=2, queue_length=7))
    settings = plan.in_force
    assert (settings.attempts, settings.queue_length, settings.max_body) == (5, 7, 2 << 20)
    assert settings.priorities == {"team-a": -1}
    assert plan.policies == ("predicted", "least_loaded")
    path.write_text("{}")
    assert read_settings(path, plan).in_force == Settings(attempts=2, queue_length=7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"atempts": 2}', "unknown setting 'atempts'; did you mean 'attempts'"),
        ('{"listen": "0.0.0.0:80"}', "listen can't change while the router runs"),
        ('{"attempts": 0}', "attempts"),
        ('{"attempts": "two"}', "attempts"),
        ('{"queue_timeout": -1}', "queue_timeout"),
        ('{"policy": "prefx"}', "did you mean 'prefix'"),
        ('{"max_body": "0"}', "at least 1 byte"),
        ('{"max_body": "16MB!"}', "must be a size"),
        ('{"strict_pd": true, "direct_below": 5}', "contradict"),
        ('{"tenants": {"a": {"prio": 1}}}', "prio"),
        ('{"attempts": 2', "cannot read settings"),
        ("[]", "cannot read settings"),
        ("\xff", "cannot read settings"),
        ("", "cannot read settings"),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said):
        read_settings(path, plan_of(path))


def test_a_file_that_still_changes_is_not_read_and_one_that_is_refused_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"attempts": 1}')
    taken: list[int] = []
    reloading = Reloading(loaded(plan_of(path)), lambda plan: taken.append(plan.in_force.attempts))
    reloading.look()
    reloading.look()
    for part in ('{"attempts', '{"attempts": ', '{"attempts": 4}'):
        path.write_text(part)
        reloading.look()  # it is another one than at the look before, so somebody may be writing it
    assert taken == []
    reloading.look()
    assert taken == [4]
    with caplog.at_level(logging.WARNING):
        path.write_text("{")
        for _ in range(5):
            reloading.look()
        assert len(caplog.records) == 1
        assert reloading.refused == ["settings"]
        reloading.read_all()  # who asks is told again
        assert len(caplog.records) == 2
    path.unlink()
    reloading.read_all()
    assert reloading.refused == ["settings"]
    path.write_text('{"attempts": 4}')
    reloading.read_all()
    assert reloading.refused == []
    assert taken == [4]


def test_everything_changes_while_a_stream_runs_which_goes_on_by_what_it_began_with(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        gate = asyncio.Semaphore(1)
        engines = [await rig.engine(Role.BOTH, token_gate=gate) for _ in range(2)]
        listed, settings = list_in(tmp_path / "instances.json", engines[:1]), tmp_path / "settings.json"
        settings.write_text("{}")
        files = Files(instances=listed, settings=settings)
        front = await start(rig, engines[:1], files, max_in_flight=10)
        under_way = asyncio.ensure_future(front.events(COMPLETION | {"max_tokens": 40, "temperature": 1}))
        await until(lambda: len(engines[0].requests) == 1)
        list_in(listed, engines[1:])
        told = {"request_timeout": 0.1, "answer_timeout": 0.1, "attempts": 1, "policy": "random"}
        settings.write_text(json.dumps(told | {"max_in_flight": 1}))
        front.app.reload()
        status, answer, _ = await front.post(COMPLETION)
        assert (status, "as many requests" in answer["error"]["message"]) == (429, True)
        await until(
            lambda: ids(engines[1:]) <= {t.id for t in front.app.registry if t.state.value == "ready"}
        )
        await asyncio.sleep(0.3)  # longer than any request has now
        for _ in range(100):
            gate.release()
        assert joined(await under_way) == "".join(tokens_of("some prompt", 40))
        await until(lambda: {tracked.id for tracked in front.app.registry} == ids(engines[1:]))
        assert await front.metric("p2pkv_proxy_reloads_total", file="settings", outcome="taken") == 1
        settings.write_text('{"workers": 3}')
        front.app.reload()
        assert await front.metric("p2pkv_proxy_reloads_total", file="settings", outcome="refused") == 1
        assert await front.metric("p2pkv_proxy_refused_files") == 1
        assert "can't change while the router runs" in front.app.registry.events[-1].text
        assert front.app.reloading.plan.in_force.attempts == 1

    run(test)


def test_an_instance_that_moves_is_asked_for_its_health_where_it_is_now(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        before, after = await rig.engine(Role.BOTH), await rig.engine(Role.BOTH)
        path = tmp_path / "instances.json"

        def place(engine: FakeEngine) -> None:
            path.write_text(json.dumps([{"id": "one", "url": engine.instance.url, "role": "both"}]))

        place(before)
        app = App(loaded(Plan(settings=Settings(), files=Files(instances=path))))
        await rig.router(app)
        await until(lambda: [t.state.value for t in app.registry] == ["ready"])
        before.is_healthy = False
        after.is_healthy = False
        place(after)
        app.reload()
        await until(lambda: [t.state.value for t in app.registry] == ["failing"])
        after.is_healthy = True
        await until(lambda: [t.state.value for t in app.registry] == ["ready"])

    run(test)
