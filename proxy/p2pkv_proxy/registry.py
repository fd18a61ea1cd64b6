"""Which instances there are, how they are, and what they have to do. One event loop uses it; nothing here waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from p2pkv.instances.heartbeat import Heartbeat, Instance, Load, State
from p2pkv_proxy.breaker import Breaker
from p2pkv_proxy.costs import Costs, Turn, Work

_log = logging.getLogger(__name__)

_PENALTY_TOKENS = 2048.0
"""For each failure of the last half minute: about a prompt. A guess."""

_LATE = 2.0
"""What is late by a second is taken to be later by so many. In simulation, with rates that vary by chance, 1 made p90
to 1.3 times worse; with 0 one that stands still looks as if it had nothing to do, and gets what comes next."""


def _rest(predicted: float, worked: float) -> float:
    """Return the seconds that a prompt still takes that was ``worked`` on for so long."""
    return predicted - max(0.0, worked) if worked <= predicted else (worked - predicted) * _LATE


class Attempt:
    """One request at one instance, from :meth:`Tracked.begin` to :meth:`Tracked.end`."""

    __slots__ = ("interrupt", "n_tokens", "seconds", "started", "took", "work")

    def __init__(self, n_tokens: int, started: float, interrupt: Callable[[], None]) -> None:
        self.n_tokens = n_tokens
        self.started = started
        self.work: Work | None = None
        """What its prompt asks of the instance, if that computes it."""
        self.seconds = 0.0
        """What that was predicted to take, once begun."""
        self.took: float | None = None
        """What it took the instance, once it has answered."""
        self.interrupt = interrupt
        """Called once if the instance is lost, so that nobody waits for it."""


class Tracked:
    """One instance as the router sees it.

    ``in_flight`` and ``n_tokens`` count what this router has sent there and was not answered yet; what other routers
    sent shows in ``load`` only, a heartbeat late, but for the other workers of this one.
    """

    def __init__(self, instance: Instance, *, is_listed: bool, costs: Costs | None = None) -> None:
        self.costs = costs if costs is not None else Costs()
        """What prompts take, here and at the others."""
        self.instance = instance
        """A listed one may say more of itself in heartbeats than its entry does."""
        self.entry = instance if is_listed else None
        """As the command line or the file names it: such a one is probed, and stays when it fails or falls silent."""
        self.load = Load(State.STARTING)
        self.boot = 0
        self.sequence = -1
        self.expires = float("inf")
        self.breaker = Breaker()
        self.n_tokens = 0
        self.sent = 0
        """Requests that went there."""
        self.served = 0
        """Requests that had an answer, or its beginning if the client left."""
        self.is_contradicted = False
        """Its heartbeats say otherwise than its entry does."""
        self.is_draining_here = False
        """The operator said so to this router."""
        self.n_requests_elsewhere = 0
        self.n_tokens_elsewhere = 0
        """Under way there for the other workers of this router."""
        self.n_tokens_since = 0
        """Tokens of the prompts that were sent there since it last said how it is."""
        self.n_others = 0
        """Requests of neither, by its last report and what was under way when that came."""
        self._attempts: dict[Attempt, None] = {}
        self._unanswered: dict[Attempt, None] = {}  # in the order they began
        self._expected: dict[Attempt, None] = {}  # of these, those whose first byte should be there soon
        self._turn = Turn()

    @property
    def id(self) -> str:
        """The instance's name."""
        return self.instance.id

    @property
    def is_listed(self) -> bool:
        """Whether the operator has named it."""
        return self.entry is not None

    @property
    def is_heard(self) -> bool:
        """Whether it sends heartbeats, and has not fallen silent."""
        return self.expires != float("inf")

    @property
    def in_flight(self) -> int:
        """Requests of this process that it has."""
        return len(self._attempts)

    @property
    def n_waiting(self) -> int:
        """Of these, those that wait for a first byte that does not wait for their last token."""
        return len(self._expected)

    @property
    def state(self) -> State:
        """Its state, draining if anybody wants so."""
        is_draining = self.is_draining_here and self.load.state is State.READY
        return State.DRAINING if is_draining else self.load.state

    @property
    def busy(self) -> int:
        """Requests it has, as far as is known."""
        return self._n_requests + self.n_others

    @property
    def weight(self) -> float:
        """Tokens in flight; what others have sent there counts as our own requests do on average."""
        own = self._n_requests
        n_tokens = self.n_tokens + self.n_tokens_elsewhere
        return n_tokens + self.n_others * (n_tokens / own if own else 512.0)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV it holds, by its own word and what was sent to it since."""
        return self.load.kv_tokens + self.n_tokens_since

    def note_load(self, load: Load) -> None:
        """Take how it is. What the router has there now is not looked for later: by then it may have ended."""
        self.load = load
        self.n_others = max(0, load.running + load.waiting - self._n_requests)

    @property
    def _n_requests(self) -> int:
        return len(self._attempts) + self.n_requests_elsewhere

    def penalty(self, now: float) -> float:
        """Tokens that count against it for its failures of late: those who fail are soon free for more."""
        return _PENALTY_TOKENS * self.breaker.n_failed(now)

    def is_full(self) -> bool:
        """Whether it has as many requests as it may."""
        return 0 < self.instance.capacity <= self.busy

    def keeps_waiting(self, now: float, patience: float) -> bool:
        """Whether a request has waited there for its first byte longer than ``patience`` seconds."""
        for attempt in self._expected:
            return now - attempt.started > patience
        return False

    def queued(self, now: float) -> float:
        """Return the seconds until it would begin with another prompt, as predicted."""
        others = max(0.0, self.weight - self.n_tokens) * self.costs.compute(self.id)
        return self.own_queue(now) + others

    def own_queue(self, now: float) -> float:
        """Return the seconds until all that this process has sent there has its first token, as predicted."""
        head = next(iter(self._unanswered), None)
        rest = 0.0 if head is None else _rest(head.seconds, now - max(head.started, self._turn.since))
        behind = 0.0 if head is None else self._turn.seconds - head.seconds
        return max(0.0, behind) + rest

    def begin(
        self,
        n_tokens: int,
        now: float,
        interrupt: Callable[[], None],
        *,
        is_prompt: bool = True,
        n_prompt: int = 0,
        work: Work | None = None,
    ) -> Attempt:
        """Count a request in. ``is_prompt``: its first byte does not wait for its last token.

        ``n_prompt``: tokens of its prompt, whose KV comes there. ``work``: what that asks of this instance, unless it
        is done elsewhere.
        """
        self.n_tokens_since += n_prompt
        attempt = Attempt(n_tokens, now, interrupt)
        if work is not None:
            attempt.work, attempt.seconds = work, self.costs.seconds(self.id, work)
            self._turn.seconds += attempt.seconds
        self._attempts[attempt] = self._unanswered[attempt] = None
        if is_prompt:
            self._expected[attempt] = None
        self.n_tokens += n_tokens
        self.sent += 1
        self.breaker.begin(attempt)
        return attempt

    def answered(self, attempt: Attempt, now: float) -> None:
        """Note its first byte. Whether the instance works shows at the answer's end."""
        if attempt in self._unanswered:
            attempt.took = self._leave(attempt, now)

    def completed(self, attempt: Attempt, now: float) -> None:
        """Note that its answer is whole: the instance works."""
        if attempt not in self._attempts:
            return
        self.breaker.succeeded(attempt, now)
        if attempt.work is not None and attempt.took is not None:
            self._turn.note(attempt.work, attempt.took)
            attempt.took = None
            if self._turn.is_enough or not self._unanswered:
                self.costs.observe(self.id, *self._turn.take())

    def _leave(self, attempt: Attempt, now: float) -> float:
        """Let it wait no longer; return for how long the instance had no older one to work on."""
        del self._unanswered[attempt]
        self._expected.pop(attempt, None)
        took = now - max(attempt.started, self._turn.since)
        self._turn.since = now
        # what sums leave of rounding would stay for good
        self._turn.seconds = self._turn.seconds - attempt.seconds if self._unanswered else 0.0
        return took

    def blamed(self, now: float) -> None:
        """Note that it refused a request that another instance has answered."""
        self.breaker.failed(None, now)

    def end(self, attempt: Attempt, now: float, *, failed: bool = False) -> None:
        """Count a request out. ``failed``: by the instance's fault. Idempotent."""
        if attempt not in self._attempts:
            return
        del self._attempts[attempt]
        is_answered = attempt not in self._unanswered
        if not is_answered:
            self._leave(attempt, now)
            self._turn.take()  # what it took the instance is nobody's
        self.n_tokens -= attempt.n_tokens
        self.served += is_answered and not failed
        if failed:
            self.breaker.failed(attempt, now)
        else:
            self.breaker.abandoned(attempt)

    def interrupt_unanswered(self) -> None:
        """Tell those to go elsewhere that have not had a byte from it."""
        for attempt in list(self._unanswered):
            attempt.interrupt()


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
        self.expired = 0
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

    def list_instance(self, instance: Instance) -> None:
        """Add one that is named by the operator; its state comes from :meth:`note_probe`."""
        known = self._tracked.get(instance.id)
        if known is not None and instance in (known.entry, known.instance):
            known.entry = instance
            return
        if known is not None:
            self._remove(known, "its entry has changed")
        self._tracked[instance.id] = Tracked(instance, is_listed=True, costs=self.costs)
        _log.info("instance %s, a %s, is listed", instance.id, instance.role.value)

    def unlist(self, instance_id: str) -> None:
        """Let one go that the operator has named: it finishes what it has, and gets nothing new."""
        tracked = self._tracked.get(instance_id)
        if tracked is not None and tracked.is_listed:
            tracked.entry = None
            tracked.load = Load(State.DRAINING)
            tracked.expires = self._now() if not tracked.in_flight else float("inf")

    def note_probe(self, instance_id: str, *, is_healthy: bool) -> None:
        """Take the result of a health check of a listed instance. Of one that is heard only a bad one says anything."""
        tracked = self._tracked.get(instance_id)
        if tracked is not None and tracked.is_listed and not (tracked.is_heard and is_healthy):
            self._set_load(tracked, Load(State.READY if is_healthy else State.FAILING))

    def note_elsewhere(self, loads: Mapping[str, tuple[int, int]]) -> None:
        """Take the requests and tokens that the other workers of this router have under way, by instance."""
        for tracked in self._tracked.values():
            tracked.n_requests_elsewhere, tracked.n_tokens_elsewhere = loads.get(tracked.id, (0, 0))

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
            tracked = self._tracked[instance.id] = Tracked(instance, is_listed=False, costs=self.costs)
            _log.info("instance %s, a %s, is there", instance.id, instance.role.value)
        elif tracked.boot != heartbeat.boot:
            tracked.breaker.reset()
        tracked.instance = instance
        tracked.boot, tracked.sequence = heartbeat.boot, heartbeat.sequence
        tracked.expires = self._now() + self._lifetime
        load = Load(
            heartbeat.state,
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
        if entry is None or (entry.url, entry.role, entry.mode) == (
            instance.url,
            instance.role,
            instance.mode,
        ):
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
            _log.info("instance %s is %s", tracked.id, load.state.value)
            if load.state is State.FAILING:
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
                _log.info(
                    "instance %s sends no heartbeats any more; it is listed, so it stays",
                    tracked.id,
                )
                tracked.expires = float("inf")
                self.expired += 1
                continue
            self.expired += not has_left
            self._remove(tracked, "it has left" if has_left else "it was not heard of in time")
        for tracked in self._tracked.values():
            if (
                tracked.load.state in (State.DRAINING, State.LEFT)
                and tracked.expires == float("inf")
                and not tracked.in_flight
            ):
                tracked.expires = now  # has left or was unlisted, and has finished

    def _remove(self, tracked: Tracked, why: str) -> None:
        del self._tracked[tracked.id]
        _log.info("instance %s is gone: %s", tracked.id, why)
        # what has begun to answer goes on: if its instance is dead, its connection says so
        tracked.interrupt_unanswered()
        for gone in self.on_gone:
            gone(tracked.id)
