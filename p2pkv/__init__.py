"""p2pkv: a transport-pluggable peer-to-peer KV-cache engine for LLM serving.

``Node.start(Config(...))`` makes this process a member of a cluster; ``publish``, ``fetch`` and ``exists`` move pages.
"""

from p2pkv.config import Config
from p2pkv.errors import (
    ClosedError,
    ConfigError,
    ControlError,
    DeviceError,
    DuplicateNodeError,
    MembershipError,
    NotRegisteredError,
    P2PKVError,
    TransportError,
    UsageError,
    VersionError,
)
from p2pkv.node import Node
from p2pkv.page import Outcome, Pieces
from p2pkv.transfer import TransferEngine

__all__ = [
    "ClosedError",
    "Config",
    "ConfigError",
    "ControlError",
    "DeviceError",
    "DuplicateNodeError",
    "MembershipError",
    "Node",
    "NotRegisteredError",
    "Outcome",
    "P2PKVError",
    "Pieces",
    "TransferEngine",
    "TransportError",
    "UsageError",
    "VersionError",
]
