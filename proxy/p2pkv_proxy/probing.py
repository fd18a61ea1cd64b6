"""Health checks of the instances that the operator named: those that send heartbeats are checked where they are.

One that is not heard any more is checked too while it has answers under way: if it is stopped, no connection says so.
"""

from __future__ import annotations

import asyncio
import logging

from p2pkv_proxy.call import InstanceError
from p2pkv_proxy.engines import Engines
from p2pkv_proxy.registry import Registry
from p2pkv_proxy.tracked import Tracked

_log = logging.getLogger(__name__)
_EVERY_S = 1.0
_ANSWER_S = 3.0
_PATIENCE = 3
"""Checks in a row that must fail: a busy engine may answer one late."""


async def probe(registry: Registry, engines: Engines) -> None:
    """Check all whom the registry wants checked about once a second, for ever, each on its own."""
    # not by their ids: an entry that has changed is another instance of the same id, at another address perhaps
    running: dict[Tracked, asyncio.Task[None]] = {}
    try:
        while True:
            followed = registry.probed
            for gone in [tracked for tracked in running if tracked not in followed]:
                running.pop(gone).cancel()
            for tracked in followed:
                if tracked not in running:
                    running[tracked] = asyncio.ensure_future(_follow(tracked, registry, engines))
            await asyncio.sleep(_EVERY_S / 4)
    finally:
        for task in running.values():
            task.cancel()


async def _follow(tracked: Tracked, registry: Registry, engines: Engines) -> None:
    n_failed = 0
    while True:
        try:
            status, _, _ = await engines.get(tracked, "/health", _ANSWER_S)
            is_healthy, said = status == 200, f"it answers with status {status}"
        except InstanceError as error:
            if not error.is_fault:  # nothing was learnt of it
                await asyncio.sleep(_EVERY_S)
                continue
            is_healthy, said = False, str(error)
        n_failed = 0 if is_healthy else n_failed + 1
        if n_failed == _PATIENCE:
            _log.warning("the health check of %s fails: %s", tracked.id, said)
        if n_failed == 0 or n_failed >= _PATIENCE:
            if tracked.is_listed and registry.get(tracked.id) is tracked:
                registry.note_probe(tracked.id, is_healthy=is_healthy)
            else:
                tracked.note_health(is_failing=not is_healthy)
        await asyncio.sleep(_EVERY_S)
