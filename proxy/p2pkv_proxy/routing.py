"""Which pair a request goes to: what can take it, what the policies choose among that, and why not if nothing can."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from p2pkv.instances.heartbeat import Mode, Role, State
from p2pkv_proxy.call import Pair
from p2pkv_proxy.policies import POLICIES, Choice, Policy
from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.settings import Settings
from p2pkv_proxy.tracked import Tracked

_RETRY_FULL_S = 1
_RETRY_NONE_S = 3
"""For ``Retry-After``: about a heartbeat."""


class RefusedError(Exception):
    """Nobody takes the request now. ``retry_after`` in seconds; None: trying again would not help."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class _Sides:
    """The instances of one mode that could take a request."""

    mode: Mode
    prefills: list[Tracked]
    decodes: list[Tracked]

    @property
    def can_serve(self) -> bool:
        """Whether somebody here can answer; an SGLang decode without a prefill can't."""
        is_alone = self.mode is not Mode.SGLANG or any(d.instance.role is Role.BOTH for d in self.decodes)
        return bool(self.decodes) and (bool(self.prefills) or is_alone)


class Router:
    """Chooses pairs. One event loop uses it."""

    def __init__(self, registry: Registry, settings: Settings, prefill: Policy, decode: Policy) -> None:
        self._registry = registry
        self.settings = settings
        self.prefill_policy = prefill
        self.decode_policy = decode
        registry.on_gone.append(self._forget)

    @property
    def wants_holdings(self) -> bool:
        """Whether a policy wants to know what the directory knows."""
        return self.prefill_policy.wants_holdings or self.decode_policy.wants_holdings

    def choose_by(self, prefill: str, decode: str) -> None:
        """Choose by the policies of these names from now on; one that stays keeps what it has learnt."""
        if type(self.prefill_policy) is not POLICIES[prefill]:
            self.prefill_policy = POLICIES[prefill]()
        if type(self.decode_policy) is not POLICIES[decode]:
            self.decode_policy = POLICIES[decode]()

    def instances(self) -> Registry:
        """Return all instances, whether they can take requests or not."""
        return self._registry

    def _forget(self, instance_id: str) -> None:
        self.prefill_policy.forget(instance_id)
        self.decode_policy.forget(instance_id)

    def choose(
        self,
        prompt: Prompt,
        path: str,
        failed: Collection[str] = (),
        *,
        only: Collection[str] | None = None,
    ) -> Pair:
        """Pick a pair, without the ``failed`` instances as long as there are others; ``only`` of these, if given.

        Raises :class:`RefusedError`.
        """
        able = self._able(prompt, path)
        if only is not None:
            able = [tracked for tracked in able if tracked.id in only]
        now = time.monotonic()
        ready = [t for t in able if t.state is State.READY]
        free = [t for t in ready if not t.is_full()] or [t for t in ready if t.is_full_by_hearsay()]
        allowed = [t for t in free if t.breaker.allows(now)]
        # from the best to the last resort: an open breaker is no reason to refuse what nobody else can do
        for candidates in ([t for t in allowed if t.id not in failed], allowed, free):
            sides = self._sides(prompt, candidates, now)
            if sides is not None:
                return self._pair(prompt, sides)
        raise self._refusal(able, ready)

    def has_others(self, prompt: Prompt, path: str, than: Tracked) -> bool:
        """Whether a request that waits at an instance could go elsewhere now, be it to wait there for room."""
        try:
            able = self._able(prompt, path)
        except RefusedError:
            return False
        others = [t for t in able if t.id != than.id and t.state is State.READY]
        sides = self._sides(prompt, others, time.monotonic())
        if sides is None:
            return False
        is_alone = prompt.is_for_one or any(t.instance.role is Role.BOTH for t in sides.decodes)
        return bool(sides.prefills) or is_alone or not self.settings.strict_pd

    def _able(self, prompt: Prompt, path: str) -> list[Tracked]:
        able = sorted(self._registry, key=lambda tracked: tracked.id)
        if path == "/generate":
            able = [tracked for tracked in able if tracked.instance.mode is Mode.SGLANG]
        if prompt.only is not None:
            able = [t for t in able if (t.instance.model, t.instance.mode) == prompt.only]
        if prompt.model and able:
            of_model = _of_model(prompt.model, able)
            if not of_model:
                raise RefusedError(404, f"the model {prompt.model[:200]!r} does not exist")
            able = of_model
        return able

    def _whole_ones(self, prompt: Prompt, candidates: Iterable[Tracked], now: float) -> _Sides | None:
        """Return those that can answer alone what is passed on as it is, ordinary engines first."""
        found = [t for t in candidates if t.instance.role is Role.BOTH]
        if not found and not prompt.needs_whole_engine:
            found = [*candidates]
        if not found and not self.settings.strict_pd:
            # SGLang's decodes end where nobody has told them of a prefill
            decodes = [t for t in candidates if t.instance.role is Role.DECODE]
            found = [t for t in decodes if t.instance.mode is not Mode.SGLANG]
        return _Sides(found[0].instance.mode, [], self._prompt_ones(found, now)) if found else None

    def _sides(self, prompt: Prompt, candidates: list[Tracked], now: float) -> _Sides | None:
        """Return the mode with most decodes that can serve, without those that keep requests waiting if possible."""
        if prompt.is_for_one:
            return self._whole_ones(prompt, candidates, now)
        by_mode: dict[Mode, list[Tracked]] = {}
        for tracked in candidates:
            by_mode.setdefault(tracked.instance.mode, []).append(tracked)
        best = None
        for mode, instances in by_mode.items():
            prefills = [t for t in instances if t.instance.role is Role.PREFILL]
            decodes = [t for t in instances if t.instance.role is not Role.PREFILL]
            if mode is Mode.SGLANG and not prefills:
                decodes = [t for t in decodes if t.instance.role is Role.BOTH]
            sides = _Sides(mode, self._prompt_ones(prefills, now), self._prompt_ones(decodes, now))
            if sides.can_serve and (best is None or len(sides.decodes) > len(best.decodes)):
                best = sides
        return best

    def _prompt_ones(self, candidates: list[Tracked], now: float) -> list[Tracked]:
        if len(candidates) < 2:
            return candidates
        patience = self.settings.slow_after
        return [t for t in candidates if not t.keeps_waiting(now, patience)] or candidates

    def _pair(self, prompt: Prompt, sides: _Sides) -> Pair:
        decode = self.decode_policy.choose(prompt, sides.decodes)
        if prompt.is_for_one:
            return _pair(None, decode, "passed on as it is")
        if decode.tracked.instance.role is Role.BOTH:
            return _pair(None, decode, "serves alone")
        if self.settings.strict_pd:
            return self._strict_pair(prompt, sides, decode)
        if not sides.prefills:
            return _pair(None, decode, "no prefill is there")
        if sides.mode is not Mode.SGLANG and prompt.n_answers > 1:
            # a hand-off is one sequence's: of a batch vLLM's answer names the first prompt's, and it is taken once
            return _pair(None, decode, f"{prompt.n_answers} answers, and a hand-off is for one")
        if sides.mode is not Mode.SGLANG and prompt.n_to_compute < self.settings.direct_below:
            return _pair(None, decode, f"{prompt.n_to_compute} tokens to compute")
        return _pair(self.prefill_policy.choose(prompt, sides.prefills), decode, "")

    def _strict_pair(self, prompt: Prompt, sides: _Sides, decode: Choice) -> Pair:
        if sides.mode is not Mode.SGLANG and prompt.n_answers > 1:
            raise RefusedError(
                400, "a prefill hands over one answer to one prompt, and decodes compute no prompts here"
            )
        if not sides.prefills:
            what = "no prefill takes the request, and decodes compute no prompts here"
            raise RefusedError(503, what, _RETRY_NONE_S)
        return _pair(self.prefill_policy.choose(prompt, sides.prefills), decode, "")

    def _refusal(self, able: Sequence[Tracked], ready: Sequence[Tracked]) -> RefusedError:
        if any(tracked.is_full() for tracked in ready):
            return RefusedError(429, "every instance has as many requests as it may", _RETRY_FULL_S)
        states = ", ".join(f"{t.id} is {t.state.value}" for t in able[:20]) or "none is known"
        return RefusedError(503, f"no pair of instances can take the request: {states}", _RETRY_NONE_S)


def _of_model(name: str, able: list[Tracked]) -> list[Tracked]:
    """Return the instances that may know a model by ``name``.

    An engine has names that it tells nobody: further served names, LoRA adapters that come and go, and
    SGLang takes any. As long as all serve one model it is the engine that knows whether there is such a name.
    """
    named = [t for t in able if t.instance.model in ("", name)]
    if named or len({t.instance.model for t in able}) == 1:
        return named or able
    base = name.partition(":")[0]  # SGLang's MODEL:ADAPTER
    return [t for t in able if t.instance.mode is Mode.SGLANG and t.instance.model == base]


def _pair(prefill: Choice | None, decode: Choice, why_alone: str) -> Pair:
    if prefill is None:
        return Pair(
            None, decode.tracked, f"direct/{decode.reason}", f"no prefill ({why_alone}); {_say(decode)}"
        )
    detail = f"{_say(prefill)}; {_say(decode)}"
    return Pair(prefill.tracked, decode.tracked, f"{prefill.reason}/{decode.reason}", detail)


def _say(choice: Choice) -> str:
    tracked = choice.tracked
    role = "decode" if tracked.instance.role is not Role.PREFILL else "prefill"
    return f"{role}={tracked.id} ({choice.reason}{': ' if choice.detail else ''}{choice.detail})"
