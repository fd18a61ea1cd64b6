"""The router's page: it shows what the metrics say, asks nobody else, and keeps what is gone with the reason."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest

from browsers import CHROMIUM, MISSING, browse
from fake_engines import FakeEngine
from p2pkv.instances.heartbeat import Heartbeat, Instance, Role, State, checked
from p2pkv_proxy import status_page
from p2pkv_proxy.app import App
from p2pkv_proxy.plan import Plan
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.settings import Settings
from patience import PATIENCE
from rig import Rig

FOLDER = Path(status_page.__file__).parent


def fetch(url: str, body: bytes | None = None) -> tuple[str, dict[str, str]]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - our own
    with urllib.request.urlopen(request, timeout=20 * PATIENCE) as page:  # noqa: S310 - our own
        return page.read().decode(), dict(page.headers)


class Front:
    """A router before two engines that has answered ``n`` requests, and lost one instance."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.engines: list[FakeEngine] = []

    async def start(self, n: int) -> None:
        self.engines = [await self._rig.engine(Role.PREFILL), await self._rig.engine(Role.DECODE)]
        instances = tuple(engine.instance for engine in self.engines)
        self.app = App(Plan(settings=Settings(), instances=instances))
        listening = await self._rig.router(self.app)
        self.url = listening.url
        until = time.monotonic() + 20 * PATIENCE
        while not all(tracked.state.value == "ready" for tracked in self.app.registry):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        lost = checked(Instance(url="http://127.0.0.1:9", role=Role.BOTH, id="lost"))
        beat = Heartbeat(instance=lost, boot=1, sequence=1, state=State.STARTING)
        self.app.registry.note_heartbeat(beat)
        tracked = self.app.registry.get("lost")
        assert tracked is not None
        tracked.expires = 0.0
        self.app.registry.expire()
        for number in range(n):
            body = json.dumps({"prompt": f"{number}", "max_tokens": 2}).encode()
            await asyncio.to_thread(fetch, f"{self.url}/v1/completions", body)


def test_the_page_and_all_it_asks_for_come_from_the_router() -> None:
    async def test() -> None:
        async with Rig() as rig:
            front = Front(rig)
            await front.start(0)
            text, headers = await asyncio.to_thread(fetch, f"{front.url}/")
            assert headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in headers["content-security-policy"]
            named = re.findall(r'(?:src|href)="([^"#]+)"', text)
            assert {"page.css", "status_page.js", "charts.js", "blocks.js"} <= set(named)
            for name in named:
                if name != "data:,":
                    await asyncio.to_thread(fetch, f"{front.url}/{name}")
            for path in FOLDER.glob("status_page.[hj]*"):
                assert re.findall(r"https?://[\w.]+", path.read_text()) == []

    asyncio.run(test())


def test_programs_are_told_who_is_gone_why_and_what_has_happened() -> None:
    async def test() -> None:
        async with Rig() as rig:
            front = Front(rig)
            await front.start(1)
            told = json.loads((await asyncio.to_thread(fetch, f"{front.url}/router.json"))[0])
            assert {one["id"] for one in told["instances"]} == {e.instance.id for e in front.engines}
            [gone] = told["gone"]
            assert (gone["id"], gone["why"]) == ("lost", "it was not heard of in time")
            texts = [event["text"] for event in told["events"] if event["instance"] == "lost"]
            assert texts == ["a both is there", "it is gone: it was not heard of in time"]

    asyncio.run(test())


def test_what_is_kept_of_who_comes_and_goes_is_bounded() -> None:
    registry = Registry()
    for number in range(1000):
        instance = checked(Instance(url="http://127.0.0.1:9", role=Role.BOTH, id=f"i{number}"))
        registry.note_heartbeat(Heartbeat(instance=instance, boot=1, sequence=1, state=State.READY))
        registry.note_heartbeat(Heartbeat(instance=instance, boot=1, sequence=2, state=State.LEFT))
    assert len(registry) == 0
    assert len(registry.gone) == 100
    assert len(registry.events) == 200


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.timeout(600)
def test_a_browser_shows_the_numbers_of_the_metrics_and_the_console_is_silent(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig() as rig:
            front = Front(rig)
            await front.start(7)
            page, console = await asyncio.to_thread(browse, f"{front.url}/?theme=dark", tmp_path)
            metrics, _ = await asyncio.to_thread(fetch, f"{front.url}/metrics")
            judge(front, page, console, metrics)

    def judge(front: Front, page: str, console: str, metrics: str) -> None:
        assert console == ""
        assert 'data-theme="dark"' in page
        lines = [line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#")]
        counted = {name: float(value) for name, _, value in lines}
        shown = {
            html.unescape(metric): float(value)
            for metric, value in re.findall(r'data-metric="([^"]+)" data-value="([^"]+)"', page)
        }
        for series in ("p2pkv_proxy_pairs_total", "p2pkv_proxy_choices_total", "p2pkv_proxy_requests_total"):
            told = {name: value for name, value in counted.items() if name.startswith(series + "{") and value}
            assert told
            assert {name: shown[name] for name in told} == told
        rows = re.findall(r'<tr data-instance="([^"]+)">(.*?)</tr>', page, re.DOTALL)
        assert {instance for instance, _ in rows} == {engine.instance.id for engine in front.engines}
        for instance, row in rows:
            for metric, value in re.findall(r'data-metric="(\w+)" data-value="([^"]+)"', row):
                role = next(e.role.value for e in front.engines if e.instance.id == instance)
                assert float(value) == counted[f'{metric}{{instance="{instance}",role="{role}"}}']
        text = html.unescape(page)
        assert "it was not heard of in time" in text
        assert page.count("<svg") == 4

    asyncio.run(test())
