"""The ucx transport on the first Soft-RoCE device, for processes of the contract suite to make by name."""

from __future__ import annotations

import os
from pathlib import Path

from p2pkv.transports.ucx import UcxTransport

# RoCE v2 devices that leave the service level of a completion empty, as Soft-RoCE does, lose every datagram of UCX
# before 1.19, and with them all connections.
os.environ.setdefault("UCX_UD_VERBS_ETH_DGID_CHECK", "n")


def unavailable() -> str | None:
    """Return what is missing, or None."""
    if not Path("/sys/class/infiniband/rxe0").exists():
        return "there is no Soft-RoCE device rxe0; make test-rdma has one"
    return UcxTransport.unavailable()


def over_rdma() -> UcxTransport:
    """Return a transport on rxe0."""
    return UcxTransport("10.77.0.1")
