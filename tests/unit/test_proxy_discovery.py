"""Heartbeats as they come in: whose are heard, and that nobody else waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.instances.heartbeat import Heart, Heartbeat, Instance, Load, Role, State, checked, pack
from p2pkv_proxy.discovery import Discovery
from p2pkv_proxy.registry import Registry

SECONDS = 120.0


def instance(name: str) -> Instance:
    return checked(Instance(url="http://127.0.0.1:1", id=name, role=Role.DECODE))


def keys_of(secret: Path) -> ClusterKeys:
    secret.write_text(f"secret {secret.name} of this test")
    secret.chmod(0o600)
    return cluster_keys(str(secret))


def test_a_router_hears_hearts_with_its_secret_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ours, theirs = (keys_of(tmp_path / name) for name in ("ours", "theirs"))

    async def listen() -> None:
        registry = Registry()
        discovery = Discovery("127.0.0.1:0", ours, registry, has_own_secret=False)
        running = asyncio.ensure_future(discovery.run())
        stranger = Heart(
            instance("stranger"), [discovery.address], theirs, lambda: Load(State.READY), interval=0.05
        )
        friend = Heart(
            instance("friend"), [discovery.address], ours, lambda: Load(State.READY, 2), interval=0.05
        )
        try:
            deadline = time.monotonic() + SECONDS
            # by then the stranger, who began before, had time for as many
            while (tracked := registry.get("friend")) is None or tracked.sequence < 5:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert tracked.load == Load(State.READY, 2)
            await asyncio.to_thread(friend.close)
            while registry.get("friend") is not None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert len(registry) == 0
            while "stranger is not announced" not in caplog.text:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert "does not let us in" in caplog.text
            assert "friend is announced to" in caplog.text
            assert "stranger is announced to" not in caplog.text
            assert registry.strangers() > 0
            assert caplog.text.count("from 127.0.0.1: whoever connects there has another secret") == 1
        finally:
            await asyncio.to_thread(stranger.close)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            discovery.close()

    asyncio.run(listen())


class Flood:
    """A socket that always has one more heartbeat, as where who has the secret sends as fast as it can."""

    def __init__(self, beats: list[bytes]) -> None:
        self.beats = beats

    async def recv_multipart(self) -> list[bytes]:
        """Return the next one without a wait; there is none after the last."""
        if not self.beats:
            await asyncio.Event().wait()
        return [self.beats.pop()]


def test_a_flood_of_heartbeats_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    async def listen() -> None:
        registry = Registry()
        discovery = Discovery("127.0.0.1:0", keys_of(tmp_path / "ours"), registry, has_own_secret=False)
        n = 1600
        one = instance("one")
        beats = [pack(Heartbeat(instance=one, boot=1, sequence=n - i, state=State.READY)) for i in range(n)]
        own, discovery._socket = discovery._socket, Flood(beats)  # type: ignore[assignment]
        running = asyncio.ensure_future(discovery.run())
        n_turns = 0
        while beats:
            await asyncio.sleep(0)
            n_turns += 1
        assert n_turns >= n // 16
        assert (tracked := registry.get("one")) is not None
        assert tracked.sequence == n
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        own.close()
        discovery.close()

    asyncio.run(listen())
