"""Heartbeats from inside an engine: routers are told of it as by ``p2pkv announce``, with no process beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from p2pkv.config import Config
from p2pkv.control.secret import cluster_keys
from p2pkv.errors import ConfigError
from p2pkv.instances.engine_check import EngineCheck
from p2pkv.instances.heartbeat import Heart, Instance, Mode, Role, checked

_CHECK_S = {Mode.SGLANG: 3.0}
"""An engine has so long to answer, for each of two pages; ``Heart.close`` may take as long. SGLang's ``/health`` takes
more than a second by design: it waits for its scheduler to have done something."""
_CHECK_S_ELSE = 1.0


def described(config: Config, engine: Instance) -> Instance:
    """Return ``engine`` with what ``config`` says otherwise. Raises :class:`ConfigError` if it has no URL."""
    if config.engine_url:
        engine = msgspec.structs.replace(engine, url=config.engine_url)
    if config.engine_role:
        engine = msgspec.structs.replace(engine, role=Role(config.engine_role))
    if not engine.url:
        raise ConfigError(
            "the engine does not say where it serves HTTP, so no router can be told: set engine_url to "
            "http://HOST:PORT, as the routers reach it"
        )
    return checked(engine)


def announce(config: Config, engine: Instance, found: Callable[[], Sequence[str]]) -> Heart:
    """Tell ``config.routers`` of an engine until the heart is closed, and those that ``found`` returns.

    ``found`` is ``Node.routers`` of a node of its own: routers tell nodes that they are there. The engine's state and
    load are asked for at its own HTTP address by the heart's thread. Raises :class:`ConfigError`.
    """
    instance = described(config, engine)
    check = EngineCheck(instance.url, "/health", timeout=_CHECK_S.get(instance.mode, _CHECK_S_ELSE))
    keys = cluster_keys(config.secret_file, config.accepted_secret_files)
    return Heart(instance, config.router_addresses, keys, check.look, found=found)
