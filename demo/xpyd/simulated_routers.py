"""Routers of the simulation: each with a registry and a policy of its own, and what it hears of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from p2pkv.instances.heartbeat import INTERVAL_S, Instance, Load, State
from p2pkv_proxy.policies import POLICIES, Policy
from p2pkv_proxy.policies.predicted import Predicted
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.shared_load import SHARE_S, HeardLoad, ToldLoad, unpack
from p2pkv_proxy.tracked import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How many routers there are, and what they know of each other."""

    n_routers: int = 1
    tells: bool = True
    """Whether they tell each other of their load; else they have the engines' heartbeats alone."""
    share_s: float = SHARE_S


class SimulatedRouter:
    """One router. ``now`` returns simulated seconds."""

    def __init__(self, policy: str, instances: Sequence[Instance], now: Callable[[], float]) -> None:
        self.policy: Policy = Predicted(now=now, seed=1) if policy == "predicted" else POLICIES[policy]()
        self.registry = Registry(now=now)
        for instance in instances:
            self.registry.list_instance(instance)
            self.registry.note_probe(instance.id, is_healthy=True)
        self.told = ToldLoad()
        self.heard = HeardLoad(self.told.replica)
        self.candidates: list[Tracked] = sorted(self.registry, key=lambda tracked: tracked.id)

    def tracked(self, name: str) -> Tracked:
        """Return an instance as this router sees it."""
        found = self.registry.get(name)
        assert found is not None
        return found


class SimulatedRouters:
    """All of them. :meth:`until` must be called before anything happens at a time."""

    def __init__(
        self, policy: str, instances: Sequence[Instance], apart: Apart, now: Callable[[], float]
    ) -> None:
        self._apart = apart
        self._next_share = apart.share_s
        self._next_report = INTERVAL_S
        self.each = [SimulatedRouter(policy, instances, now) for _ in range(apart.n_routers)]

    def until(self, now: float, queues: Callable[[], Mapping[str, int]]) -> None:
        """Deliver what was said up to ``now``; since the last call nothing has happened.

        ``queues`` returns the requests that each instance has.
        """
        if len(self.each) == 1:
            return
        while min(self._next_share, self._next_report) <= now:
            if self._next_share <= self._next_report:
                self._share(self._next_share)
                self._next_share += self._apart.share_s
            else:
                self._report(queues())
                self._next_report += INTERVAL_S

    def _share(self, at: float) -> None:
        if not self._apart.tells:
            return
        for sender in self.each:
            for message in sender.told.messages(sender.registry.under_way(), at):
                load = unpack(message)
                assert load is not None
                for receiver in self.each:
                    receiver.heard.note(load, at)
        for router in self.each:
            router.heard.expire(at)
            router.registry.note_replicas(router.heard.take_changed())

    def _report(self, queues: Mapping[str, int]) -> None:
        for router in self.each:
            for tracked in router.candidates:
                tracked.note_load(Load(State.READY, queues[tracked.id]))
