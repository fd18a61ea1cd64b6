"""A transport over one device, for processes of the contract suite to make by name."""

from __future__ import annotations

from p2pkv.transports.verbs import VerbsTransport, ports


def one_rail() -> VerbsTransport:
    """Return a transport over the first device."""
    return VerbsTransport([ports()[0].device])
