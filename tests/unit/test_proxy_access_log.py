"""The access log: every request is in it once, nothing secret is, and no request waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.access_log import AccessLog, Entry, check_writable, trace_id_of
from p2pkv_proxy.api_keys import ApiKeys
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.settings import Settings
from rig import Rig

KEY = "sk-ours-0123456789"
SECRET = "a prompt that nobody else should read"
BODY = {"prompt": SECRET, "max_tokens": 3}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def run(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def within() -> None:
        async with Rig() as rig:
            await asyncio.wait_for(test(rig), 120.0)

    asyncio.run(within())


def entry(number: int = 0) -> Entry:
    told: dict[str, Any] = dict.fromkeys(Entry.__struct_fields__)
    return Entry(
        **told
        | {"at": "", "method": "POST", "path": "/", "outcome": "ok", "attempts": number, "seconds": 0.0}
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_request_is_told_once_with_its_pair_and_without_what_is_secret(tmp_path: Path) -> None:
    path, keys = tmp_path / "access.log", tmp_path / "keys"
    keys.write_text(f"team-a {KEY}\n")
    keys.chmod(0o600)
    names: list[str] = []

    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        instances = (prefill.instance, decode.instance)
        names.extend(instance.id for instance in instances)
        app = App(
            Plan(settings=Settings(), instances=instances, access_log=str(path), api_keys=ApiKeys.read(keys))
        )
        listening = await rig.router(app)
        while not all(tracked.state.value == "ready" for tracked in app.registry):
            await asyncio.sleep(0.005)
        known = {"authorization": f"Bearer {KEY}"}
        asked: list[tuple[bytes, dict[str, str], int]] = [
            (json.dumps(BODY).encode(), known | {"x-request-id": "one", "traceparent": TRACE}, 200),
            (json.dumps(BODY | {"stream": True}).encode(), known | {"traceparent": "nonsense"}, 200),
            (b"no json", known, 400),
            (json.dumps(BODY).encode(), {"x-request-id": "none"}, 401),
        ]
        async with aiohttp.ClientSession() as session:
            for body, headers, status in asked:
                url = listening.url + "/v1/completions"
                async with session.post(url, data=body, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == status
            decode.refusal = (500, b"{}")
            async with session.post(listening.url + "/v1/completions", json=BODY, headers=known) as answer:
                assert answer.status == 500
        # who is asked is told of the trace, whatever the router makes of it
        assert [engine.headers[0]["traceparent"] for engine in (prefill, decode)] == [TRACE, TRACE]
        while app._serving is not None and app._serving.in_flight:
            await asyncio.sleep(0.005)

    run(test)
    told = lines_of(path)
    assert [one["outcome"] for one in told] == ["ok", "ok", "client_error", "denied", "engine_error"]
    assert [one["key"] for one in told] == ["team-a", "team-a", "team-a", None, "team-a"]
    first = told[0]
    assert (first["request_id"], first["trace_id"], told[1]["trace_id"]) == ("one", TRACE[3:35], None)
    assert [first["prefill"], first["decode"]] == names
    assert first["reason"].count("/") == 1
    assert [one["attempts"] for one in told][:4] == [1, 1, 0, 0]
    assert [one["is_stream"] for one in told] == [False, True, None, None, False]
    assert 0 < first["first_byte_seconds"] <= first["seconds"]
    assert told[4]["first_byte_seconds"] is None
    assert SECRET not in path.read_text()
    assert KEY not in path.read_text()


def test_a_file_that_was_moved_away_is_made_anew_and_a_folder_that_comes_back_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    dropped = threading.Event()
    log = AccessLog(str(folder / "access.log"), dropped.set)
    log.write(entry(1))
    _await(lambda: len(lines_of(folder / "access.log")) == 1)
    (folder / "access.log").rename(folder / "access.log.1")
    log.write(entry(2))
    _await(lambda: (folder / "access.log").exists() and len(lines_of(folder / "access.log")) == 1)
    folder.rename(tmp_path / "away")
    log.write(entry(3))
    assert dropped.wait(60)
    (tmp_path / "away").rename(folder)
    log.write(entry(4))
    log.close()
    log.close()
    assert [one["attempts"] for one in lines_of(folder / "access.log")] == [2, 4]


def test_nobody_waits_for_a_pipe_that_takes_nothing_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lost: list[int] = []
    log = AccessLog(str(path), lambda: lost.append(1))
    n_written = 15_000
    for number in range(n_written):
        log.write(entry(number))
    assert 0 < len(lost) < n_written
    raw = b""
    n_kept = n_written - len(lost)
    while raw.count(b"\n") < n_kept:
        try:
            raw += os.read(reader, 1 << 20)
        except BlockingIOError:
            continue
    log.close()
    os.close(reader)
    assert [json.loads(line)["attempts"] for line in raw.splitlines()] == sorted(
        json.loads(line)["attempts"] for line in raw.splitlines()
    )


def test_what_can_not_be_written_is_said_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="cannot write the access log"):
            check_writable(str(path))
        with pytest.raises(ConfigError, match="cannot write the access log"):
            AccessLog(str(path), lambda: None)
    for path in (None, "-", str(tmp_path / "log")):
        check_writable(path)


def test_only_a_trace_that_can_be_one_is_told() -> None:
    def told(value: bytes) -> str | None:
        return trace_id_of([(b"traceparent", value)])

    assert told(TRACE.encode()) == TRACE[3:35]
    for wrong in (b"", b"x" * 60_000, TRACE.upper().encode(), TRACE.encode() + b"\n", TRACE[:-1].encode()):
        assert told(wrong) is None
    assert trace_id_of([]) is None


def _await(holds: Callable[[], bool]) -> None:
    """Wait for what the log's thread does; the test's time is the limit."""
    while not holds():
        os.sched_yield()
