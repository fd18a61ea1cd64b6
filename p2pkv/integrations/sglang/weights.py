"""Which weights this process computes KV with: a part of every key, so that KV of other weights is never a hit.

SGLang replaces weights while it serves (``update_weights_from_disk``, ``_distributed``, ``_tensor``, ``_ipc``). Weights
that were given a version are those of every server with that version. Without one nobody can know who else has them, so
they get a name of their own, and this server shares its KV with its own ranks only, until it is told a version
(``/update_weight_version``) or is given other weights with one.

The name changes when an update is over: SGLang stops its storage threads and forgets what they had still to write
when it flushes its caches, which it does within the update. Where it is told not to flush, or can't, its caches hold KV
of both weights; then the name is one of its own too, until the flush.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from p2pkv.integrations.sglang.installed import server_settings

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_IN_A_SESSION = _UPDATES[1:3]
"""Any number of these, each with a part of the weights, lie between ``begin_weight_update`` and ``end_weight_update``;
outside of that SGLang refuses them, and changes nothing."""


class Weights:
    """The name of the weights; changed by SGLang's main thread only, read by any."""

    def __init__(self, version: str) -> None:
        self._name = _versioned(version)
        self._version: str | None = version
        self._has_mixed_kv = False  # SGLang's caches have KV of earlier weights
        self._is_partial = False  # more of the same update will follow
        self._n_updates = 0
        self._changed: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        """Equal on two servers if their weights are known to be."""
        return self._name

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called after each change, on the thread that makes it."""
        self._changed.append(changed)

    def forget(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` no more. Idempotent."""
        self._changed = [known for known in self._changed if known != changed]

    def updated(
        self, version: str | None, server: str, *, has_mixed_kv: bool, is_partial: bool = False
    ) -> None:
        """Take notice of an update that is over, whether it succeeded or failed half-way.

        ``server`` is equal on all tensor-parallel ranks of this server and on nobody else's. After a part of an update
        come others, and :meth:`completed`.
        """
        self._n_updates += 1
        self._version = version
        self._has_mixed_kv = has_mixed_kv
        self._is_partial = is_partial
        self._rename(server)

    def completed(self, server: str) -> None:
        """Take notice that no more parts follow."""
        self._is_partial = False
        self._rename(server)

    def told(self, version: str, server: str) -> None:
        """Take the version of the weights as they are now."""
        self._version = version
        self._rename(server)

    def flushed(self, server: str) -> None:
        """SGLang's caches are empty: from here on all its KV is of the weights that it has now."""
        if self._has_mixed_kv:
            self._has_mixed_kv = False
            self._n_updates += 1  # what was published since is of both
            self._rename(server)

    def _rename(self, server: str) -> None:
        is_known = self._version is not None and not self._has_mixed_kv and not self._is_partial
        name = _versioned(self._version or "") if is_known else f"update {self._n_updates} of {server}"
        if name != self._name:
            self._name = name
            for changed in self._changed:
                changed()


def _versioned(version: str) -> str:
    return f"version {version!r}"


def _of_this_process() -> Weights:
    serving = server_settings("serving")
    return Weights(str(getattr(serving, "weight_version", None) or "default"))


_weights: Weights | None = None
_server = ""


def served() -> Weights:
    """Return the weights of this process's server."""
    global _weights
    if _weights is None:
        _weights = _of_this_process()
    return _weights


def watch(register: Callable[[str, Callable[..., Any], Any], None], around: Any) -> None:
    """Have SGLang's updates noticed, through its hooks: ``register(target, hook, around)``."""
    for update in _UPDATES:
        register(f"{_UPDATER}.{update}", _around_update(update in _IN_A_SESSION), around)
    register(f"{_UPDATER}.end_weight_update", _around_end, around)
    register(f"{_SCHEDULER}.flush_cache", _around_flush, around)
    register(f"{_SCHEDULER}.handle_update_weight_version", _around_version, around)


def _around_update(is_in_a_session: bool) -> Callable[..., Any]:
    def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        if is_in_a_session and manager._session is None:
            return original(manager, request)
        weights, server = served(), _server_name(manager.tp_cpu_group)
        result = None
        try:
            result = original(manager, request)
        finally:
            is_whole = result is not None and result.success
            weights.updated(
                request.weight_version if is_whole else None,
                server,
                has_mixed_kv=not (is_whole and request.flush_cache),
                is_partial=is_in_a_session,
            )
        return result

    return update


def _around_end(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    result = original(manager, *args)
    if manager._session is None:
        served().completed(_server)
    return result


def _around_flush(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    is_flushed = original(scheduler, *args, **kwargs)
    if is_flushed:
        served().flushed(_server)
    return is_flushed


def _around_version(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    result = original(scheduler, request)
    served().told(request.new_version, _server)
    return result


def _server_name(group: Any) -> str:
    """Return a random name, the same on all ranks of ``group``; they all come here at the same update, the first."""
    global _server
    if not _server:
        torch = importlib.import_module("torch")
        name = torch.tensor(list(os.urandom(16)), dtype=torch.uint8)
        if torch.distributed.get_world_size(group) > 1:
            first = torch.distributed.get_global_rank(group, 0)
            torch.distributed.broadcast(name, src=first, group=group)
        _server = bytes(name.tolist()).hex()
    return _server
