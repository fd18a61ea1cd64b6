"""Data parallel ranks as instances of their own: engines are told which one is to answer."""

from __future__ import annotations

import msgspec
import pytest

from fake_engines import FakeEngine
from front import COMPLETION, Front, run, start
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Instance, Mode, Role, checked
from rig import Rig


async def ranked(rig: Rig, engines: list[FakeEngine], n_ranks: int) -> Front:
    """A router that knows ranks in place of the engines, which are there for the ports."""
    front = await start(rig, engines)
    for engine in engines:
        front.app.registry.unlist(engine.instance.id)
        for rank in range(n_ranks):
            one = checked(msgspec.structs.replace(engine.instance, dp_rank=rank, id=""))
            front.app.registry.list_instance(one)
            front.app.registry.note_probe(one.id, is_healthy=True)
    front.app.registry.expire()
    return front


@pytest.mark.parametrize("mode", [Mode.VLLM, Mode.SGLANG])
def test_each_rank_gets_its_requests_and_a_clients_wish_is_not_heard(mode: Mode) -> None:
    async def test(rig: Rig) -> None:
        pair = [await rig.engine(Role.PREFILL, mode), await rig.engine(Role.DECODE, mode)]
        front = await ranked(rig, pair, 2)
        for _ in range(4):
            assert (await front.post(COMPLETION, **{"x-data-parallel-rank": "7"}))[0] == 200
        for engine in pair:
            ranks = [headers["x-data-parallel-rank"] for headers in engine.headers]
            assert sorted(ranks) == ["0", "0", "1", "1"]
        if mode is Mode.SGLANG:
            told = {request["disagg_prefill_dp_rank"] for request in pair[1].requests}
            assert told == {0, 1}

    run(test)


def test_sglang_is_told_in_the_body_of_generate() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH, Mode.SGLANG)
        front = await ranked(rig, [engine], 2)
        for _ in range(2):
            assert (await front.post({"text": "x"}, "/generate"))[0] == 200
        assert sorted(request["routed_dp_rank"] for request in engine.requests) == [0, 1]

    run(test)


def test_without_ranks_nobody_is_told_of_any() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        assert (await front.post(COMPLETION))[0] == 200
        assert "x-data-parallel-rank" not in engine.headers[0]

    run(test)


def test_ranks_have_names_of_their_own_and_are_numbers() -> None:
    one = checked(Instance(url="http://a:1", role=Role.BOTH, dp_rank=3))
    assert one.id == "a:1@3"
    assert b"dp_rank" not in msgspec.msgpack.encode(Instance(url="http://a:1", role=Role.BOTH))
    with pytest.raises(ConfigError, match="dp_rank"):
        checked(Instance(url="http://a:1", role=Role.BOTH, dp_rank=-1))
