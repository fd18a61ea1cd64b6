"""One instance as the router sees it: what it is, how it is, and what it has to do. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable

from p2pkv._native import Patience
from p2pkv.instances.heartbeat import Instance, Load, State
from p2pkv_proxy.breaker import Breaker
from p2pkv_proxy.costs import Costs, Turn, Work

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

    __slots__ = ("interrupt", "n_tokens", "patience", "seconds", "started", "took", "work")

    def __init__(
        self, n_tokens: int, started: float, interrupt: Callable[[], None], patience: Patience | None
    ) -> None:
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
        self.patience = patience
        """It says how long the instance's next bytes are waited for; None: nobody waits by it."""


class Tracked:
    """One instance as the router sees it.

    ``in_flight`` and ``n_tokens`` count what this router has sent there and was not answered yet; what other routers
    sent they tell, and what they don't shows in ``load``, a heartbeat late.
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
        self.is_unreachable = False
        """It is listed, and its health check fails, whatever its heartbeats say."""
        self.was_listed = False
        """The operator has named it, and does so no more."""
        self.is_draining_here = False
        """The operator said so to this router."""
        self.n_requests_elsewhere = 0
        self.n_tokens_elsewhere = 0
        """Under way there for the other workers of this router."""
        self.n_requests_replicas = 0
        self.n_tokens_replicas = 0
        """Under way there for the routers beside this one, by their own word."""
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
        n_tokens = self.n_tokens + self.n_tokens_elsewhere + self.n_tokens_replicas
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
        return len(self._attempts) + self.n_requests_elsewhere + self.n_requests_replicas

    def penalty(self, now: float) -> float:
        """Tokens that count against it for its failures of late: those who fail are soon free for more."""
        return _PENALTY_TOKENS * self.breaker.n_failed(now)

    def is_full(self) -> bool:
        """Whether it has as many requests as it may."""
        return 0 < self.instance.capacity <= self.busy

    def is_full_by_hearsay(self) -> bool:
        """Whether it is full only because other routers say so, and neither it nor this one does.

        One that lies must not have this one refuse requests.
        """
        own = len(self._attempts) + self.n_requests_elsewhere
        known = max(own + self.n_others, self.load.running + self.load.waiting)
        return self.is_full() and known < self.instance.capacity

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
        patience: Patience | None = None,
        is_prompt: bool = True,
        n_prompt: int = 0,
        work: Work | None = None,
    ) -> Attempt:
        """Count a request in. ``is_prompt``: its first byte does not wait for its last token.

        ``patience``: with the instance's next bytes, told here how the instance is.
        ``n_prompt``: tokens of its prompt, whose KV comes there. ``work``: what that asks of this instance, unless it
        is done elsewhere.
        """
        self.n_tokens_since += n_prompt
        attempt = Attempt(n_tokens, now, interrupt, patience)
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

    def note_health(self, *, is_failing: bool) -> None:
        """Have all it has under way wait as long as for one whose health check fails, or as long as ever."""
        for attempt in self._attempts:
            if attempt.patience is not None:
                attempt.patience.is_failing = is_failing
