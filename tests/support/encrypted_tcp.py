"""The tcp transport as a node has it with ``encrypt: tcp``, for the contract suite and its child processes."""

from __future__ import annotations

from p2pkv.transports.native import TcpTransport


def transport() -> TcpTransport:
    """Start one; it reads only from others that encrypt."""
    return TcpTransport(encrypt=True)
