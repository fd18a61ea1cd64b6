"""What a SGLang server tells the routers of itself: once, whichever of p2pkv's parts are plugged into it.

SGLang detaches storage backends while it runs and never says when it ends, so a heart beats until the process ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2pkv.address import reachable_host
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.instances.announcing import announce, described
from p2pkv.instances.heartbeat import Heart, Instance, Mode, Role
from p2pkv.integrations.sglang.installed import server_settings
from p2pkv.node import Node

_log = logging.getLogger(__name__)

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
"""By ``--disaggregation-mode``; anything else computes prompts itself."""

_changing = threading.Lock()
_hearts: dict[str, Heart] = {}
"""By URL; one, but for tests."""
_finders: list[weakref.WeakMethod[Callable[[], Sequence[str]]]] = []
"""``Node.routers`` of this process's nodes: backends are detached, and the heart goes on with those that there are."""


def announce_server(config: Config, index: int, node: Node | None = None, **pages: Any) -> None:
    """Tell routers of the server this process belongs to, if it is the first of its processes.

    They are ``config.routers``, and those that have told ``node`` of themselves. Without any in ``config`` a server
    whose address is not known is not announced. ``pages`` are fields of :class:`Instance` that say where its pages
    are; a part that knows more than an earlier one adds it. Raises :class:`ConfigError`. Blocks on nobody.
    """
    if index != 0:
        return
    try:
        engine = described(config, _instance(config))
    except ConfigError as error:
        if config.router_addresses:
            raise
        _log.debug("no router will be told of this server: %s", error)
        return
    with _changing:
        _finders[:] = [finder for finder in _finders if finder() is not None]
        if node is not None:
            _finders.append(weakref.WeakMethod(node.routers))
        heart = _hearts.get(engine.url)
        if heart is not None:
            heart.change(msgspec.structs.replace(heart.instance, **pages))
            return
        _hearts[engine.url] = announce(config, msgspec.structs.replace(engine, **pages), _found)


def _found() -> list[str]:
    """Return the routers that this process's nodes know of."""
    routers = (finder() for finder in list(_finders))
    return [router for known in routers if known is not None for router in known()]


def _instance(config: Config) -> Instance:
    """Return what SGLang's own settings say; without a URL where there is no server."""
    serving, disagg = server_settings("serving"), server_settings("disagg")
    if serving is None or disagg is None:
        return Instance(url="", role=Role.BOTH, mode=Mode.SGLANG)
    role = _ROLES.get(disagg.disaggregation_mode, Role.BOTH)
    return Instance(
        url="" if config.engine_url else _url(serving, config),
        role=role,
        mode=Mode.SGLANG,
        model=str(serving.served_model_name or ""),
        bootstrap_port=disagg.disaggregation_bootstrap_port if role is Role.PREFILL else None,
    )


def _url(serving: Any, config: Config) -> str:
    try:
        others = config.router_addresses or config.outward_addresses
        host = reachable_host(serving.host, others)
    except ConfigError as error:
        raise ConfigError(
            f"SGLang listens on {serving.host}, and no way to {', '.join(others) or 'anybody'} tells which of "
            "this machine's addresses routers reach; set engine_url (P2PKV_ENGINE_URL) to http://HOST:PORT"
        ) from error
    scheme = "https" if serving.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{serving.port}" if ":" in host else f"{scheme}://{host}:{serving.port}"


@atexit.register
def end() -> None:
    """Say good-bye to the routers. Idempotent."""
    with _changing:
        for heart in _hearts.values():
            heart.close()
        _hearts.clear()
