"""A vLLM instance computes with hand-offs while they are being loaded, layer by layer, and prefill is late or dies.

A prefill instance offers layers late, in any order, or never, and is lost in the middle of a step; requests share
steps, have some of their prompt already, and are aborted. What is free is overwritten before each round, so that no KV
is right by chance.

Oracle: nobody computes with a layer that is not there, unless he is told in the same step that his load has failed; a
hand-off that nothing befell is loaded; a step takes no longer than ``layer_deadline``, and nothing is written to its
blocks afterwards; both instances have every block back.
"""

from __future__ import annotations

import gc
import heapq
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cluster import eventually
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node
from p2pkv.integrations.vllm_connector import handoff
from p2pkv.testing.lateness import Lateness
from p2pkv.testing.ports import free_port
from p2pkv.transfers import Offer, RowStatus
from vllm_engine import EngineFake
from vllm_fakes import BLOCK, RequestFake
from vllm_instances import hand_off
from vllm_layers import LayerEngineFake

N_BLOCKS = 64
LEASE_S = 1.0
HEALTHY_S, BUSY_S = 0.5, 0.2
"""A step that may wait so long must not fail a load that nothing befell, on a machine that is not later than this."""
SLACK_S = 0.1
OVER_S = 20.0
FAULTS = {"none": 4, "late": 5, "too late": 2, "aborted": 2, "prefill is lost": 1}


class LateOffer:
    """An offer that is made some time after its caller has it."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows, self.made = n_rows, threading.Event()
        self.offer: Offer | None = None

    def done(self) -> bool:
        return self.made.is_set() and (self.offer is None or self.offer.done())

    def statuses(self) -> Any:
        if self.offer is None:
            return np.full(self._n_rows, RowStatus.PENDING, np.uint8)
        return self.offer.statuses()


class LateNode(Node):
    """A node that makes its offers when their time has come, on a thread of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.delays: list[float] = []
        """Of the next offers; those after them are made at once."""
        self._offer = self.transfers.offer
        self.transfers.offer = self._later  # type: ignore[method-assign, assignment]
        self._changed = threading.Condition()  # guards what follows
        self._due: list[tuple[float, int, LateOffer, Any]] = []
        self._n_due = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="late-offers")
        self._thread.start()

    def _later(self, name: str, rows: np.ndarray, **options: Any) -> Offer | LateOffer:
        if not self.delays:
            return self._offer(name, rows, **options)
        late = LateOffer(len(rows))
        with self._changed:
            self._n_due += 1
            at = time.monotonic() + self.delays.pop(0)
            heapq.heappush(self._due, (at, self._n_due, late, lambda: self._offer(name, rows, **options)))
            self._changed.notify()
        return late

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_over and not (self._due and self._due[0][0] <= time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._is_over:
                    return
                *_, late, make = heapq.heappop(self._due)
            late.offer = make()
            late.made.set()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        super().close()


class World:
    """One schedule."""

    def __init__(self, seed: int, tally: Tally, late: Lateness) -> None:
        self.chance, self.tally, self.late = random.Random(seed), tally, late
        self.settings = {
            "join": f"127.0.0.1:{free_port()}",
            "share_prefixes": False,
            "transfer_lease": LEASE_S,
            "load_deadline": 5.0,
        }
        self.n_prompts = self.n_prefills = 0
        self.layer_deadline = self.chance.choice([0.05, HEALTHY_S, HEALTHY_S])
        self.prefill = self.start_prefill()
        self.decode = LayerEngineFake(
            self.settings | {"node_id": "decode", "layer_deadline": self.layer_deadline},
            role="kv_consumer",
            policy=self.chance.choice(["recompute", "fail"]),
            n_blocks=N_BLOCKS,
        )
        self.meet()

    def start_prefill(self) -> EngineFake:
        self.n_prefills += 1
        name = f"prefill-{self.n_prefills}"
        settings = self.settings | {"node_id": name}
        return EngineFake(settings, role="kv_producer", n_blocks=N_BLOCKS, start_node=LateNode)

    def meet(self) -> None:
        pair = (self.prefill.node, self.decode.node)
        names = {node.node_id for node in pair}
        eventually(lambda: all(names <= {m.node_id for m in node.members()} for node in pair), OVER_S)

    def round(self) -> None:
        """Hand some prompts over in one step."""
        fault = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.overwrite_free()
        began = self.late.worst
        requests = []
        for _ in range(self.chance.randint(1, 3)):
            self.n_prompts += 1
            n_tokens = self.chance.randint(1, 8 * BLOCK)
            prompt = [self.n_prompts * 1000 + i for i in range(n_tokens)]
            self.prefill.node.delays = self.delays(fault)  # type: ignore[attr-defined]
            given = hand_off(self.prefill, prompt)
            n_local = self.chance.choice([0, 0, n_tokens // 2]) // BLOCK * BLOCK
            requests.append(self.decode.submit(prompt, given, n_local=n_local))
        with ThreadPoolExecutor(1) as pool:
            if fault == "prefill is lost":
                pool.submit(self.lose, self.chance.choice([0.0, 0.003, 0.02]))
            self.step()
            if fault == "aborted":
                self.tally["aborted"] += 1
                for request in requests:
                    if request.state != "finished":
                        self.decode.abort(request)
            until = time.monotonic() + OVER_S
            while not self.decode.is_idle:
                if time.monotonic() > until:
                    raise Broken(f"requests are not over after {OVER_S} s")
                self.step()
        if fault == "prefill is lost":
            self.tally["prefills lost"] += 1
            self.prefill.close()
            self.prefill = self.start_prefill()
            self.meet()
        self.judge(requests, fault, began)

    def delays(self, fault: str) -> list[float]:
        n = self.chance.randint(1, 3)
        if fault == "late":
            return [self.chance.uniform(0.0, 0.03) for _ in range(n)]
        return [0.0] * (n - 1) + [self.layer_deadline + 0.2] if fault == "too late" else []

    def lose(self, after: float) -> None:
        time.sleep(after)  # the loss comes in the middle of a step
        self.prefill.node.close()

    def step(self) -> None:
        before = time.monotonic()
        self.decode.step()
        took = time.monotonic() - before
        if took > self.layer_deadline + SLACK_S + self.late.worst:
            raise Broken(f"a step took {took:.3f} s")
        time.sleep(0.0005)  # as between two steps

    def judge(self, requests: list[RequestFake], fault: str, began: float) -> None:
        if self.decode.wrong:
            raise Broken(f"{self.decode.wrong} computed with KV that was not there ({fault})")
        is_healthy = self.layer_deadline >= HEALTHY_S and max(began, self.late.worst) < BUSY_S
        if fault in ("none", "late") and is_healthy and self.decode.counts.get("handoffs_failed"):
            raise Broken(f"a load failed, and nothing had befallen it ({fault})")
        for name in ("handoffs_loaded_by_layer", "handoffs_loaded", "handoffs_failed"):
            self.tally[name] += self.decode.counts.pop(name, 0)
        if sorted(self.decode.free) != list(range(1, N_BLOCKS)):
            raise Broken(f"decode has {len(self.decode.free)} of {N_BLOCKS - 1} blocks back ({fault})")
        self.prefill.step_until(lambda: self.prefill.is_idle, LEASE_S + OVER_S)
        if sorted(self.prefill.free) != list(range(1, N_BLOCKS)):
            raise Broken(f"prefill has {len(self.prefill.free)} of {N_BLOCKS - 1} blocks back ({fault})")
        self.check_untouched()

    def overwrite_free(self) -> None:
        self.decode.overwrite(self.decode.free)

    def check_untouched(self) -> None:
        """Nothing is written to blocks once they are nobody's."""
        self.overwrite_free()
        time.sleep(self.chance.choice([0.0, 0.01]))  # who writes late has time to
        if (self.decode._blocks[:, 1:] != -1).any():
            raise Broken("free blocks were written to")
        self.tally["blocks untouched"] += 1

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def run(seed: int, tally: Tally, stop: Stop) -> None:
    """Hand prompts over, round by round."""
    before, handoff.OFFER_NBYTES = handoff.OFFER_NBYTES, random.Random(seed).choice([1, 4096, 1 << 22])
    try:
        with Lateness() as late:
            world = World(seed, tally, late)
            try:
                for _ in range(world.chance.randint(6, 20)):
                    world.round()
                    if stop():
                        break
            finally:
                world.close()
    finally:
        handoff.OFFER_NBYTES = before
    del world
    gc.collect()  # nodes are in cycles, and keep their descriptors until those are found


HUNT = Hunt(
    name="vllm_layers",
    promise="a vLLM step that loads by layer computes with no layer that is not there, and ends in time",
    run=run,
    effects=("handoffs_loaded_by_layer", "handoffs_failed", "aborted", "prefills lost", "blocks untouched"),
    enough=20,
)
