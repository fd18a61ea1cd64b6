"""The settings of the node that a prefill or decode rank runs for its transfers.

SGLang has no option for them, so they come from ``P2PKV_*`` environment variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from p2pkv.config import Config
from p2pkv.errors import ConfigError
from p2pkv.integrations.engine import numbered
from p2pkv.integrations.nodes import member_beside
from p2pkv.integrations.sglang.pd.wire import node_id


def pd_config(host: str, port: int, *, index: int, environ: Mapping[str, str] | None = None) -> Config:
    """Make the configuration of rank ``index`` of a server, whose SGLang messages come to ``host:port``.

    The node publishes no pages and has no disk, whatever the environment says: that is meant for HiCache's node in
    the same process. Nor is it attached, though that one may be: only members have offers. Its id is made, since the
    other server has to know it. Raises :class:`ConfigError`, and :class:`~p2pkv.errors.ControlError` if there is no
    node to attach to, whose address is needed.
    """
    settings = {
        "node_id": node_id(host, port),
        "pool_size": 0,
        "disk_size": 0,
        "disk_path": None,
        "buffer_size": 0,  # every request is granted before it is offered; what comes later is not wanted
        "buddy_pool_size": 0,
    }
    config = member_beside(Config.load(settings, environ=environ))
    if not config.join_addresses and config.store is None:
        raise ConfigError(
            "prefill and decode servers have to meet: set P2PKV_JOIN to the same HOST:PORT for all of them (on one "
            "machine any free port of 127.0.0.1 will do), or P2PKV_MEMBERSHIP to an etcd or Kubernetes"
        )
    return dataclasses.replace(numbered(config, index, tag="-rank"), node_id=config.node_id)


def require_known_memory(device: str) -> None:
    """Raise :class:`ConfigError` where KV is neither in host memory nor on a CUDA device."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"KV is in the memory of device {device!r}, but p2pkv's transfer backend moves that of hosts and CUDA "
            "devices only: run SGLang with --device cpu or cuda, or choose another --disaggregation-transfer-backend"
        )
