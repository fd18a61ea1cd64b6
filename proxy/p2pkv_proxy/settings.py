"""What the router may be told, with the reasons for the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from p2pkv.errors import ConfigError
from p2pkv_proxy.continuation import Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and times in bytes and seconds. They never change: a file of settings puts others in their place."""

    max_body: int = 16 << 20
    """Of a request; a prompt of a million token ids has about 7 MiB."""
    max_answer: int = 64 << 20
    """Of an engine's answer that is not a stream."""
    body_timeout: float = 30.0
    """For a request's body to arrive, however slowly it comes."""
    connect_timeout: float = 2.0
    """To an engine; it is in the same data centre."""
    answer_timeout: float = 120.0
    """For an engine's next bytes: the first token of a long prompt, or the next one. An answer that is no stream has
    the request's time: it comes in one piece behind its last token."""
    client_timeout: float = 30.0
    """For a client to take what was sent to it."""
    request_timeout: float = 900.0
    """For a request from its first byte to its last."""
    drain_timeout: float = 30.0
    """For requests under way when the router is told to end; then they are broken off."""
    slow_after: float = 15.0
    """An instance that has kept a stream or a prompt waiting so long for its first byte is avoided while there are
    others."""
    stalled_after: float = 20.0
    """For the next bytes of a stream that has begun, from an instance whose health check fails; then it goes on
    elsewhere, or is told to be broken. Shorter than ``answer_timeout``, which is for instances of which nothing is
    known."""
    attempts: int = 3
    """Pairs a request is tried on."""
    resume: Resume = Resume.GREEDY
    """Streams that go on elsewhere when their decode fails."""
    strict_pd: bool = False
    """Decodes never compute prompts: without a prefill requests are refused."""
    pass_unknown: bool = False
    """Paths that the router does not know go to an instance too: an engine may have some that are not for everybody."""
    max_in_flight: int = 1024
    """Requests at once; more are refused with 429."""
    queue_length: int = 256
    """Requests that may wait while all instances that could take them are full; 0 refuses them at once."""
    queue_bytes: int = 64 << 20
    """Of their bodies."""
    queue_timeout: float = 10.0
    """For each to find room; then it is refused with 429."""
    direct_below: int = 0
    """Prompts with fewer tokens to compute than this go to the decode alone, where it can compute them."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """By the names of API keys: while requests wait those with a lower one go first. Who is not named has 0."""

    def shared(self, n_workers: int) -> Settings:
        """Return what one worker has of these: what bounds the router is divided among all."""
        return replace(
            self,
            max_in_flight=-(-self.max_in_flight // n_workers),
            queue_length=-(-self.queue_length // n_workers),
            queue_bytes=self.queue_bytes // n_workers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a file says in place of options."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """By the names of fields of :class:`Settings`, of their types."""
    prefill_policy: str | None = None
    decode_policy: str | None = None


def check_settings(settings: Settings) -> None:
    """Raise :class:`ConfigError` if they can't be."""
    if settings.max_body < 1:
        raise ConfigError(f"max_body must be at least 1 byte, not {settings.max_body}")
    if settings.strict_pd and settings.direct_below:
        raise ConfigError("strict_pd and direct_below contradict each other; leave out one")
