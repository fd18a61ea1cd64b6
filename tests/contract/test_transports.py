"""The contract suite over every transport there is: a new one adds a line."""

from __future__ import annotations

import pytest

from p2pkv.testing.transport_contract import TransportContract
from p2pkv.transports.ucx import UcxTransport


class TestShm(TransportContract):
    factory = "p2pkv.transports.native:ShmTransport"


class TestTcp(TransportContract):
    factory = "p2pkv.transports.native:TcpTransport"
    secret_at = 32  # in the first of several tokens


class TestLocal(TransportContract):
    factory = "p2pkv.transports.local:LocalTransport"
    crosses_processes = False


_NO_UCX = UcxTransport.unavailable()


@pytest.mark.skipif(_NO_UCX is not None, reason=str(_NO_UCX))
class TestUcx(TransportContract):
    factory = "p2pkv.transports.ucx:UcxTransport"
    secret_at = 16
