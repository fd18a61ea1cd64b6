"""p2pkv: a transport-pluggable peer-to-peer KV-cache engine for LLM serving.

``Node.start(Config(...))`` makes this process a member of a cluster; ``publish``, ``fetch`` and ``exists`` move pages.

Names are loaded when they are first used: ``import p2pkv.errors``, as a router or a script does, costs neither numpy
nor ZeroMQ nor the native core.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from p2pkv._native import SharedRegion
    from p2pkv.cache.drained import Drained
    from p2pkv.cache.hand_overs import HandOver
    from p2pkv.cache.pins import Pin
    from p2pkv.cache.prefetch import Prefetch, PrefetchOutcome
    from p2pkv.config import Config
    from p2pkv.directory.epochs import Bump
    from p2pkv.directory.view import Member, State
    from p2pkv.errors import (
        ClosedError,
        ConfigError,
        ControlError,
        DeviceError,
        DuplicateNodeError,
        MembershipError,
        NotRegisteredError,
        P2PKVError,
        RegistryError,
        TransportError,
        UsageError,
        VersionError,
    )
    from p2pkv.memory.registered import Memory
    from p2pkv.node import Node
    from p2pkv.page import Outcome, Pieces, Whereabouts, page_key
    from p2pkv.peers.connections import PeerTraffic

__all__ = [
    "Bump",
    "ClosedError",
    "Config",
    "ConfigError",
    "ControlError",
    "DeviceError",
    "Drained",
    "DuplicateNodeError",
    "HandOver",
    "Member",
    "MembershipError",
    "Memory",
    "Node",
    "NotRegisteredError",
    "Outcome",
    "P2PKVError",
    "PeerTraffic",
    "Pieces",
    "Pin",
    "Prefetch",
    "PrefetchOutcome",
    "RegistryError",
    "SharedRegion",
    "State",
    "TransportError",
    "UsageError",
    "VersionError",
    "Whereabouts",
    "page_key",
]

_HOMES = {
    "Bump": "directory.epochs",
    "Config": "config",
    "Drained": "cache.drained",
    "HandOver": "cache.hand_overs",
    "Member": "directory.view",
    "Memory": "memory.registered",
    "Node": "node",
    "Outcome": "page",
    "PeerTraffic": "peers.connections",
    "Pieces": "page",
    "Pin": "cache.pins",
    "Prefetch": "cache.prefetch",
    "PrefetchOutcome": "cache.prefetch",
    "SharedRegion": "_native",
    "State": "directory.view",
    "Whereabouts": "page",
    "page_key": "page",
}
"""The modules of the public names that are not errors."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("p2pkv")
    if name not in __all__:
        raise AttributeError(f"module 'p2pkv' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"p2pkv.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value  # the next use of the name does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
