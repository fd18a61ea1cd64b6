"""Requests that wait at an instance whose health check fails: they stay where nobody else could take them."""

from __future__ import annotations

import asyncio

import pytest

from fake_engines import FakeEngine
from front import COMPLETION, SECONDS, Front, run, start, until
from p2pkv.instances.heartbeat import Role
from rig import Rig


async def waiting_at(front: Front, engine: FakeEngine) -> asyncio.Future[str]:
    """Send a request that ``engine`` keeps without a word, and have the engine's health check fail."""
    engine.gate.clear()
    asked = asyncio.ensure_future(front.text(COMPLETION))
    await until(lambda: engine.requests != [])
    engine.is_healthy = False
    front.app.registry.note_probe(engine.instance.id, is_healthy=False)
    return asked


def test_a_request_stays_with_a_busy_engine_if_there_is_no_other() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        asked = await waiting_at(front, engine)
        status, _, headers = await front.post(COMPLETION)
        assert (status, headers["retry-after"]) == (503, "3")  # nothing new goes there
        engine.gate.set()
        assert await asked
        assert len(engine.requests) == 1
        assert await front.metric("p2pkv_proxy_retries_total") == 0

    run(test)


def test_a_request_that_had_to_stay_goes_to_who_comes_to_be_ready() -> None:
    async def test(rig: Rig) -> None:
        busy, other = await rig.engine(Role.BOTH), await rig.engine(Role.BOTH)
        front = await start(rig, [busy], stalled_after=2 * SECONDS)
        asked = await waiting_at(front, busy)
        front.app.registry.list_instance(other.instance)
        assert await asked
        assert (len(busy.requests), len(other.requests)) == (1, 1)

    run(test)


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_prompt_stays_with_its_prefill_where_decodes_may_compute_none(is_strict: bool) -> None:
    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        front = await start(rig, [prefill, decode], strict_pd=is_strict)
        asked = await waiting_at(front, prefill)
        if is_strict:
            prefill.gate.set()
        assert await asked
        assert await front.metric("p2pkv_proxy_retries_total") == (0 if is_strict else 1)

    run(test)
