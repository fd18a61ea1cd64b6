"""API keys at the router: who has one gets in, nobody else reaches an engine, and no engine is told a client's key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from fake_engines import FakeEngine
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Role
from p2pkv_proxy.api_keys import VARIABLE, ApiKeys, keys_in_environment, read_engines_key
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Files, Plan
from p2pkv_proxy.reloading import Reloading, loaded
from p2pkv_proxy.settings import Settings
from rig import Rig

OURS, THEIRS, WRONG = "sk-ours-0123456789", "sk-theirs-0123456789", "sk-nobodys-0123456789"
BODY = {"prompt": "some prompt", "max_tokens": 5}


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    fresh = folder / "fresh"
    fresh.write_text("\n".join(lines) + "\n")
    fresh.chmod(mode)
    return fresh.replace(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def start(
    rig: Rig, engines: list[FakeEngine], keys: Path | None, engines_key: bytes | None = None
) -> tuple[App, str]:
    instances = tuple(engine.instance for engine in engines)
    files = Files(api_keys=keys)
    app = App(loaded(Plan(settings=Settings(), instances=instances, files=files, engines_key=engines_key)))
    listening = await rig.router(app)
    while not all(tracked.state.value == "ready" for tracked in app.registry):
        await asyncio.sleep(0.005)
    return app, listening.url


async def ask(url: str, path: str = "/v1/completions", **headers: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=BODY, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


def test_without_a_right_key_nothing_is_to_be_had(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engine = await rig.engine(Role.BOTH)
            app, url = await start(rig, [engine], key_file(tmp_path, OURS))
            wrong = [{}, bearer(WRONG), bearer(OURS[:-1]), bearer(OURS + "x"), bearer("")]
            wrong += [{"authorization": OURS}, {"authorization": f"Basic {OURS}"}, {"x-api-key": OURS}]
            async with aiohttp.ClientSession() as session:
                for path in (
                    "/v1/completions",
                    "/v1/chat/completions",
                    "/generate",
                    "/",
                    "/metrics",
                    "/nowhere",
                ):
                    for headers in wrong:
                        async with session.post(url + path, json=BODY, headers=headers) as answer:
                            assert answer.status == 401
                            assert answer.headers["www-authenticate"] == "Bearer"
                            assert (await answer.json())["error"]["type"] == "authentication_error"
                for path in ("/", "/metrics", "/instances", "/v1/models", "/get_model_info"):
                    async with session.get(url + path) as answer:
                        assert answer.status == 401
                twice = [("authorization", f"Bearer {OURS}"), ("authorization", f"Bearer {WRONG}")]
                async with session.post(url + "/v1/completions", json=BODY, headers=twice) as answer:
                    assert answer.status == 401
                async with session.get(url + "/healthz") as answer:
                    assert answer.status == 200
            assert engine.requests == []
            count = app.metrics.registry.get_sample_value("p2pkv_proxy_requests_total", {"outcome": "denied"})
            assert count == 6 * len(wrong) + 6

    asyncio.run(test())


def test_a_refused_body_is_not_read_and_its_connection_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engine = await rig.engine(Role.BOTH)
            _, url = await start(rig, [engine], key_file(tmp_path, OURS))
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n")
            raw = await asyncio.wait_for(reader.read(), 30)  # to the connection's end, though no body came
            assert raw.startswith(b"HTTP/1.1 401")
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("engines_key", [None, b"sk-the-engines-own"])
def test_engines_are_told_their_own_key_or_none(tmp_path: Path, engines_key: bytes | None) -> None:
    async def test() -> None:
        async with Rig() as rig:
            prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
            _, url = await start(rig, [prefill, decode], key_file(tmp_path, OURS), engines_key)
            assert await ask(url, **bearer(OURS)) == 200
            async with (
                aiohttp.ClientSession() as session,
                session.get(url + "/v1/models", headers=bearer(OURS)) as answer,
            ):
                assert answer.status == 200
            told = f"Bearer {engines_key.decode()}" if engines_key else ""
            assert [e.headers[0].get("authorization", "") for e in (prefill, decode)] == [told, told]
            assert {key for e in (prefill, decode) for path, key in e.asked if path == "/v1/models"} <= {told}

    asyncio.run(test())


def test_keys_change_with_their_file_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"ours {OURS}", "# a comment", "", THEIRS)
    plan = loaded(Plan(settings=Settings(), files=Files(api_keys=path)))
    reloading = Reloading(plan, lambda plan: None)

    def names() -> list[str | None]:
        reloading.look()
        reloading.look()  # what is the same at two looks is taken
        keys = reloading.plan.api_keys
        assert keys is not None
        return [keys.name_of([(b"authorization", f"bearer {key}".encode())]) for key in (OURS, THEIRS, WRONG)]

    assert names() == ["ours", "key-4", None]
    key_file(tmp_path, f"theirs {THEIRS}")
    assert names() == [None, "theirs", None]
    for broken in (("short",), ("three words here",), (), (THEIRS, THEIRS)):
        key_file(tmp_path, *broken)
        assert names() == [None, "theirs", None]
        assert reloading.refused == ["api_keys"]
    path.unlink()
    assert names() == [None, "theirs", None]
    key_file(tmp_path, OURS)
    assert names() == ["key-1", None, None]
    assert reloading.refused == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["short"], "16 to 512 printable"),
        (["x" * 513], "16 to 512 printable"),
        (["name schlüssel-schlüssel"], "printable ASCII"),
        (["one two three-0123456789"], "3 words"),
        ([OURS, f"again {OURS}"], "line 2: the key is there twice"),
        (["# none"], "nobody could use"),
    ],
)
def test_a_bad_list_is_refused_and_no_key_is_in_the_message(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        ApiKeys(lines, "keys")
    assert not any(word in str(raised.value) for line in lines for word in line.split() if len(word) > 9)


def test_files_that_anybody_reads_and_keys_given_twice_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="anybody"):
        ApiKeys.read(key_file(tmp_path, OURS, mode=0o644))
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.read(tmp_path / "missing")
    with pytest.raises(ConfigError, match="one line"):
        read_engines_key(key_file(tmp_path, OURS, THEIRS))
    assert read_engines_key(key_file(tmp_path, "", OURS)) == OURS.encode()
    assert keys_in_environment(None) is None
    monkeypatch.setenv(VARIABLE, f"ours {OURS},{THEIRS}")
    keys = keys_in_environment(None)
    assert keys is not None
    assert keys.name_of([(b"authorization", f"Bearer {OURS}".encode())]) == "ours"
    with pytest.raises(ConfigError, match="given twice"):
        keys_in_environment(key_file(tmp_path, OURS))
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match="nobody could use"):
        keys_in_environment(None)
