"""What a SGLang server tells the routers of itself: once, whichever of p2pkv's parts are plugged into it.

SGLang detaches storage backends while it runs and never says when it ends, so a heart beats until the process ends.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

import msgspec

from p2pkv.address import reachable_host
from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.instances.announcing import announce, described
from p2pkv.instances.heartbeat import Heart, Instance, Mode, Role
from p2pkv.integrations.sglang.installed import server_settings

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
"""By ``--disaggregation-mode``; anything else computes prompts itself."""

_changing = threading.Lock()
_hearts: dict[str, Heart] = {}
"""By URL; one, but for tests."""


def announce_server(config: Config, index: int, **pages: Any) -> None:
    """Tell ``config.routers`` of the server this process belongs to, if it is the first of its processes.

    ``pages`` are fields of :class:`Instance` that say where its pages are; a part that knows more than an earlier one
    adds it. Raises :class:`ConfigError`. Blocks on nobody.
    """
    if index != 0 or not config.router_addresses:
        return
    engine = described(config, _instance(config))
    with _changing:
        heart = _hearts.get(engine.url)
        if heart is not None:
            heart.change(msgspec.structs.replace(heart.instance, **pages))
            return
        started = announce(config, msgspec.structs.replace(engine, **pages))
        if started is not None:
            _hearts[engine.url] = started


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
        host = reachable_host(serving.host, config.router_addresses)
    except ConfigError as error:
        raise ConfigError(
            f"SGLang listens on {serving.host}, and no way to {', '.join(config.router_addresses)} tells which of "
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
