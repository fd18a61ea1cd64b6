"""Which instances there are, how they are, and what they have to do. One event loop uses it; nothing here waits."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from p2pkv.instances.heartbeat import Heartbeat, Instance, Load, Mode, Role, State
from p2pkv_proxy.costs import Costs
from p2pkv_proxy.replicas import Replicas
from p2pkv_proxy.tracked import Tracked

_log = logging.getLogger(__name__)
_MOST_EVENTS = 200
"""So many of what has happened are kept for the page."""
_MOST_GONE = 100
"""Where instances come and go, as in Kubernetes, each has another name."""


@dataclass(frozen=True, slots=True)
class Event:
    """What has happened to an instance."""

    at: float
    """Seconds since 1970."""
    instance: str
    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """An instance that is no longer there."""

    instance: Instance
    why: str
    at: float
    """Seconds since 1970."""
    served: int
    """Requests that it had answered."""


class Registry:
    """All instances by id. ``lifetime`` is how long one counts that was not heard of, in seconds."""

    def __init__(self, *, lifetime: float = 10.0, now: Callable[[], float] = time.monotonic) -> None:
        self._tracked: dict[str, Tracked] = {}
        self._lifetime = lifetime
        self._now = now
        self.refused = 0
        """Heartbeats that were not taken."""
        self.strangers: Callable[[], int] = lambda: 0
        """How many connections for heartbeats were refused; whoever takes heartbeats knows."""
        self.replicas: Replicas | None = None
        """The routers beside this one, if it takes messages of such itself."""
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        """The latest is the last."""
        self.gone: OrderedDict[str, Gone] = OrderedDict()
        """Those that went lately, with the reason; the last one to go is the last. One that is back is not in it."""
        self.n_replicas_told = 0
        """How many there are, if another process takes their messages."""
        self.expired = 0
        self._left_behind: list[Tracked] = []  # gone from here with answers under way
        self.costs = Costs()
        """What prompts take at each of them, learnt."""
        self.on_gone: list[Callable[[str], None]] = [self.costs.forget]

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._tracked.values())

    def __len__(self) -> int:
        return len(self._tracked)

    def get(self, instance_id: str) -> Tracked | None:
        """Return one by its id."""
        return self._tracked.get(instance_id)

    def can_serve(self, *, strict_pd: bool) -> bool:
        """Whether an ordinary request would be served now; ``strict_pd``: never by a decode without a prefill."""
        ready = {
            (tracked.instance.role, tracked.instance.mode) for tracked in self if tracked.state is State.READY
        }
        # SGLang's decodes end where nobody has told them of a prefill
        alone = {
            mode for role, mode in ready if role is Role.DECODE and mode is not Mode.SGLANG and not strict_pd
        }
        pairs = {mode for role, mode in ready if role is Role.DECODE and (Role.PREFILL, mode) in ready}
        return bool(alone or pairs) or any(role is Role.BOTH for role, _ in ready)

    def list_instance(self, instance: Instance) -> None:
        """Add one that is named by the operator, or take what is new of it; its state comes from :meth:`note_probe`."""
        known = self._tracked.get(instance.id)
        if known is not None and _is_same(known.instance, instance):
            if known.instance != instance and not known.is_heard:
                known.instance = instance  # one that is heard says more of itself than its entry does
            known.entry, known.was_listed = instance, False
            return
        if known is not None:
            self._remove(known, "its entry has changed")
        self._track(instance, is_listed=True)
        self._tell(instance.id, f"it is listed as a {instance.role.value}")

    def _track(self, instance: Instance, *, is_listed: bool) -> Tracked:
        self.gone.pop(instance.id, None)
        tracked = self._tracked[instance.id] = Tracked(instance, is_listed=is_listed, costs=self.costs)
        if self.replicas is not None:  # which may have sent it something before
            self.note_replicas({instance.id: self.replicas.heard.sums().get(instance.id, (0, 0))})
        return tracked

    def unlist(self, instance_id: str) -> None:
        """Let one go that the operator has named: it finishes what it has, and gets nothing new."""
        tracked = self._tracked.get(instance_id)
        if tracked is not None and tracked.is_listed:
            tracked.entry, tracked.was_listed = None, True
            tracked.is_unreachable = False  # nobody asks it any more, so nobody would take that back
            tracked.load = Load(State.DRAINING)
            tracked.expires = self._now() if not tracked.in_flight else float("inf")

    def note_probe(self, instance_id: str, *, is_healthy: bool) -> None:
        """Take the result of a health check of a listed instance.

        Of one that is heard a good one says only that its heartbeats are believed.
        """
        tracked = self._tracked.get(instance_id)
        if tracked is None or not tracked.is_listed:
            return
        tracked.is_unreachable = not is_healthy
        if not (tracked.is_heard and is_healthy):
            self._set_load(tracked, Load(State.READY if is_healthy else State.FAILING))

    @property
    def probed(self) -> list[Tracked]:
        """Those whose health is asked for: who is listed, and who is not heard while answers of it are under way."""
        self._left_behind = [tracked for tracked in self._left_behind if tracked.in_flight]
        here = [t for t in self if t.is_listed or (t.in_flight and not t.is_heard)]
        return here + self._left_behind

    def note_elsewhere(self, loads: Mapping[str, tuple[int, int]]) -> None:
        """Take the requests and tokens that the other workers of this router have under way, by instance."""
        for tracked in self._tracked.values():
            tracked.n_requests_elsewhere, tracked.n_tokens_elsewhere = loads.get(tracked.id, (0, 0))

    def note_replicas(self, loads: Mapping[str, tuple[int, int]]) -> None:
        """Take the requests and tokens that the routers beside this one have under way, of some instances."""
        for name, (n_requests, n_tokens) in loads.items():
            if (tracked := self._tracked.get(name)) is not None:
                tracked.n_requests_replicas, tracked.n_tokens_replicas = n_requests, n_tokens

    @property
    def n_replicas(self) -> int:
        """Routers beside this one that are heard."""
        return len(self.replicas.heard.replicas) if self.replicas is not None else self.n_replicas_told

    def under_way(self) -> dict[str, tuple[int, int]]:
        """Return the requests and tokens that this process has under way, by instance."""
        return {
            tracked.id: (tracked.in_flight, tracked.n_tokens)
            for tracked in self._tracked.values()
            if tracked.in_flight
        }

    def set_draining(self, instance_id: str, *, to: bool) -> None:
        """Have an instance finish what it has and get nothing new, or go on, as the operator says."""
        tracked = self._tracked.get(instance_id)
        if tracked is not None:
            tracked.is_draining_here = to

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take an instance's report, unless a newer one was here before."""
        instance = heartbeat.instance
        tracked = self._tracked.get(instance.id)
        if tracked is not None and (heartbeat.boot, heartbeat.sequence) <= (tracked.boot, tracked.sequence):
            self.refused += 1
            return
        if heartbeat.state is State.LEFT:
            if tracked is not None and not tracked.is_listed:
                self._leave(tracked, heartbeat)
            return
        if tracked is not None and tracked.instance != instance and not self._may_say(tracked, instance):
            return
        if tracked is not None and tracked.instance != instance and not tracked.is_listed:
            self._remove(tracked, "it was started anew as another")
            tracked = None
        if tracked is None:
            tracked = self._track(instance, is_listed=False)
            self._tell(instance.id, f"a {instance.role.value} is there")
        elif tracked.boot != heartbeat.boot:
            tracked.breaker.reset()
        tracked.instance = instance
        tracked.boot, tracked.sequence = heartbeat.boot, heartbeat.sequence
        tracked.expires = self._now() + self._lifetime
        # heartbeats go on where only its HTTP stands still, and nobody could be served by it
        is_stuck = tracked.is_unreachable and heartbeat.state is State.READY
        load = Load(
            State.FAILING if is_stuck else heartbeat.state,
            heartbeat.running,
            heartbeat.waiting,
            heartbeat.kv_tokens,
            heartbeat.kv_capacity,
        )
        self._set_load(tracked, load)
        tracked.n_tokens_since = 0

    def _may_say(self, tracked: Tracked, instance: Instance) -> bool:
        """Whether a heartbeat may say this of an instance: a listed one is where and what the operator says."""
        entry = tracked.entry
        if entry is None or _is_same(entry, instance):
            return True
        self.refused += 1
        if not tracked.is_contradicted:
            tracked.is_contradicted = True
            _log.warning(
                "instance %s is listed as a %s of mode %s at %s, and says that it is a %s of mode %s at %s; "
                "its heartbeats are not taken",
                *(tracked.id, entry.role.value, entry.mode.value, entry.url),
                *(instance.role.value, instance.mode.value, instance.url),
            )
        return False

    def _leave(self, tracked: Tracked, heartbeat: Heartbeat) -> None:
        """A good-bye: nothing new. What it has may end, however long that takes: if it dies its connections say so."""
        tracked.boot, tracked.sequence = heartbeat.boot, heartbeat.sequence
        self._set_load(tracked, Load(State.LEFT))
        tracked.expires = float("inf") if tracked.in_flight else self._now()
        self.expire()

    def _set_load(self, tracked: Tracked, load: Load) -> None:
        before = tracked.load
        tracked.note_load(load)
        if load.state is not before.state:
            level = logging.WARNING if load.state is State.FAILING else logging.INFO
            self._tell(tracked.id, f"it is {load.state.value}", level)
            if load.state is State.FAILING:
                tracked.interrupt_unanswered()
            if load.state is State.READY:
                self._relieve(tracked)
        if State.FAILING in (load.state, before.state):
            tracked.note_health(is_failing=load.state is State.FAILING)

    def _relieve(self, ready: Tracked) -> None:
        """Tell requests without a byte of an answer that somebody is ready who may do what fails or is silent.

        One that is heard again has what it had: those requests stay with it.
        """
        silent = [t for t in self._left_behind if t.load.state not in (State.LEFT, State.DRAINING)]
        for tracked in (*(t for t in self if t.load.state is State.FAILING), *silent):
            if tracked.id != ready.id:
                tracked.interrupt_unanswered()

    def expire(self, late: float = 0.0) -> None:
        """Remove those not heard of in time; their requests without a byte of an answer go elsewhere.

        Called by a timer, not by reports. ``late``: for so many seconds this process has listened to nobody, as when it
        was stopped: these count against nobody.
        """
        now = self._now()
        for tracked in self._tracked.values():
            tracked.expires += late
        for tracked in [tracked for tracked in self._tracked.values() if tracked.expires <= now]:
            has_left = tracked.load.state in (State.LEFT, State.DRAINING)
            if tracked.is_listed:
                what = "it sends no heartbeats any more; it is listed, so it stays"
                self._tell(tracked.id, what, logging.WARNING)
                tracked.expires = float("inf")
                self.expired += 1
                continue
            self.expired += not has_left
            why = "it has left" if has_left else "it was not heard of in time"
            if tracked.was_listed and has_left:
                why = "it is no longer listed"
            self._remove(tracked, why, logging.INFO if has_left else logging.WARNING)
        for tracked in self._tracked.values():
            if (
                tracked.load.state in (State.DRAINING, State.LEFT)
                and tracked.expires == float("inf")
                and not tracked.in_flight
            ):
                tracked.expires = now  # has left or was unlisted, and has finished

    def _remove(self, tracked: Tracked, why: str, level: int = logging.INFO) -> None:
        del self._tracked[tracked.id]
        self._tell(tracked.id, f"it is gone: {why}", level)
        self.gone[tracked.id] = Gone(tracked.instance, why, time.time(), tracked.served)
        self.gone.move_to_end(tracked.id)
        if len(self.gone) > _MOST_GONE:
            self.gone.popitem(last=False)
        # what has begun to answer goes on: if its instance is dead, its connection says so, or its health check
        tracked.interrupt_unanswered()
        if tracked.in_flight:
            self._left_behind.append(tracked)
        for gone in self.on_gone:
            gone(tracked.id)

    def _tell(self, instance: str, what: str, level: int = logging.INFO) -> None:
        """Note what has happened, for the log and the page."""
        _log.log(level, "instance %s: %s", instance, what)
        self.events.append(Event(time.time(), instance, what))


def _is_same(one: Instance, other: Instance) -> bool:
    """Whether two descriptions are of an engine at one place that does the same."""
    return (one.url, one.role, one.mode) == (other.url, other.role, other.mode)
