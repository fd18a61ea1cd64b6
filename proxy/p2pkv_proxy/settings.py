"""What the router may be told, with the reasons for the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv_proxy.continuation import Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and times in bytes and seconds. Never changes while the router runs."""

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
