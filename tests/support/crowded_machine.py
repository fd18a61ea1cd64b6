"""A simulated machine that all nodes share, and that has less of a processor than they ask for."""

from __future__ import annotations

from p2pkv.testing.simulated_network import SimulatedNetwork, Simulation


class CrowdedMachine(Simulation):
    """Answers come in the order in which they are asked for, each after all work before it."""

    def __init__(self, work_s: float) -> None:
        """``work_s``: seconds of the machine that asking and answering once takes."""
        super().__init__()
        self._work_s = work_s
        self._free_at = 0.0

    def delay(self, asker: SimulatedNetwork, peer: SimulatedNetwork) -> float:
        now = asker.clock.now
        self._free_at = max(self._free_at, now) + self._work_s
        return max(super().delay(asker, peer), self._free_at - now)
