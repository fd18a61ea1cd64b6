"""What a policy is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from p2pkv_proxy.prompts import Prompt
from p2pkv_proxy.registry import Tracked


@dataclass(frozen=True, slots=True)
class Choice:
    """An instance, and why: one of a few words for the metrics, and a sentence for whoever asks."""

    tracked: Tracked
    reason: str
    detail: str = ""


class Policy(ABC):
    """Chooses for one side, prefill or decode. Called by one thread; never waits."""

    wants_holdings: ClassVar[bool] = False
    """Whether the directory should be asked for ``prompt.holdings`` first."""

    @abstractmethod
    def choose(self, prompt: Prompt, candidates: Sequence[Tracked]) -> Choice:
        """Pick one of ``candidates``, of which there is at least one, ordered by id."""

    def forget(self, instance_id: str) -> None:  # noqa: B027 - most have nothing to forget
        """Drop what was remembered of an instance that is gone."""


def lightest(candidates: Sequence[Tracked]) -> Tracked:
    """Return the one with the fewest tokens in flight, then the fewest requests, then the fewest ever.

    Failures of late count as tokens: who fails at once would else always have the fewest.
    """
    now = time.monotonic()
    return min(
        candidates, key=lambda tracked: (tracked.weight + tracked.penalty(now), tracked.busy, tracked.sent)
    )
