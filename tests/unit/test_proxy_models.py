"""What the router knows of instances by name: their models, their keys, what was counted of them."""

from __future__ import annotations

from front import COMPLETION, run, start, until
from p2pkv.instances.heartbeat import Mode, Role
from rig import Rig


def test_a_name_that_only_the_engine_knows_is_for_the_engine_to_judge() -> None:
    """LoRA adapters and further served names are told to no router; of two models' adapters none can be guessed."""

    async def test(rig: Rig) -> None:
        first = await rig.engine(Role.BOTH, model="one")
        front = await start(rig, [first, await rig.engine(Role.BOTH, model="one")])
        assert (await front.post(COMPLETION | {"model": "adapter-of-one"}))[0] == 200
        front = await start(rig, [first, await rig.engine(Role.BOTH, model="two")])
        assert (await front.post(COMPLETION | {"model": "adapter-of-one"}))[0] == 404
        assert (await front.post(COMPLETION | {"model": "one"}))[0] == 200
        assert first.requests[-1]["model"] == "one"

    run(test)


def test_sglangs_adapters_go_to_their_model() -> None:
    async def test(rig: Rig) -> None:
        engines = [await rig.engine(Role.BOTH, Mode.SGLANG, model=model) for model in ("one", "two")]
        front = await start(rig, engines)
        assert (await front.post(COMPLETION | {"model": "two:adapter"}))[0] == 200
        assert engines[1].requests[0]["model"] == "two:adapter"

    run(test)


def test_the_clients_key_goes_with_questions_to_the_engine() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        headers = {"Authorization": "Bearer 1234"}
        async with front.session.get(front.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
        assert engine.asked[-1] == ("/v1/models", "Bearer 1234")

    run(test)


def test_what_is_counted_of_an_instance_goes_with_it() -> None:
    async def test(rig: Rig) -> None:
        engine = await rig.engine(Role.BOTH)
        front = await start(rig, [engine])
        await front.text(COMPLETION)
        labels = {"prefill": "", "decode": engine.instance.id}
        assert await front.metric("p2pkv_proxy_pairs_total", **labels) == 1
        front.app.registry.unlist(engine.instance.id)
        await until(lambda: not list(front.app.registry))
        assert front.app.metrics.registry.get_sample_value("p2pkv_proxy_pairs_total", labels) is None

    run(test)
