"""Requests for several answers: batches, and several samples of one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from front import COMPLETION, run, start
from p2pkv.instances.heartbeat import Mode, Role
from rig import Rig


@pytest.mark.parametrize("prompt", ["x", ["x"]])
def test_samples_that_would_share_a_room_are_refused_before_they_reach_the_pair(prompt: object) -> None:
    async def test(rig: Rig) -> None:
        pair = [await rig.engine(Role.PREFILL, Mode.SGLANG), await rig.engine(Role.DECODE, Mode.SGLANG)]
        front = await start(rig, pair)
        for path, body in (
            ("/v1/completions", {"prompt": prompt, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
            ("/generate", {"text": prompt, "sampling_params": {"n": 2}}),
            ("/generate", {"text": prompt, "sampling_params": [{"n": 2}]}),
        ):
            status, answer, _ = await front.post(body, path)
            assert status == 400
            assert "n must be 1" in answer["error"]["message"]
        assert pair[0].requests == pair[1].requests == []
        # an ordinary engine needs no rooms
        alone = await start(rig, [await rig.engine(Role.BOTH, Mode.SGLANG)])
        assert (await alone.post({"prompt": prompt, "n": 2}))[0] == 200

    run(test)


@pytest.mark.parametrize("several", [{"prompt": ["some prompt", "another"]}, {"n": 2}])
def test_what_one_hand_off_can_not_serve_goes_to_the_decode_alone(several: dict[str, Any]) -> None:
    """An answer of vLLM's to a batch names the KV of its first prompt, and the first of several samples takes it."""

    async def test(rig: Rig) -> None:
        prefill, decode = await rig.engine(Role.PREFILL), await rig.engine(Role.DECODE)
        front = await start(rig, [prefill, decode])
        status, _, headers = await front.post(COMPLETION | several, **{"x-p2pkv-explain": "1"})
        assert status == 200
        assert "2 answers" in headers["x-p2pkv-route"]
        assert prefill.requests == []
        assert "kv_transfer_params" not in decode.requests[0]
        await front.text(COMPLETION | {"prompt": ["one of one"], "n": 1})
        assert len(prefill.requests) == 1

    run(test)
