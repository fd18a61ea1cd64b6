"""Transports without nodes around them, by the names that rows have: tcp is there encrypted as well."""

from __future__ import annotations

from p2pkv.transports import available, transport_class
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.native import TcpTransport

ENCRYPTED = "tcp, encrypted, 1 stream"
"""One stream, to be compared with one raw stream: what a core encrypts and another decrypts."""


def names() -> list[str]:
    """Return what can run on this machine."""
    able = [name for name, missing in available().items() if missing is None and name != "local"]
    if "tcp" in able and TcpTransport.unavailable({"encrypt": True}) is None:
        able.insert(able.index("tcp") + 1, ENCRYPTED)
    return able


def start(name: str) -> Transport:
    """Start the transport of that name."""
    if name == ENCRYPTED:
        return TcpTransport.create(TransportSettings(options={"tcp": {"encrypt": True, "streams": 1}}))
    return transport_class(name).create(TransportSettings())
