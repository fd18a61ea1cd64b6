"""The contract suite over every transport there is: a new one adds a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fake_nccl
from p2pkv.testing.transport_contract import TransportContract
from p2pkv.transports.native import TcpTransport
from p2pkv.transports.ucx import UcxTransport


class TestShm(TransportContract):
    factory = "p2pkv.transports.native:ShmTransport"


class TestTcp(TransportContract):
    factory = "p2pkv.transports.native:TcpTransport"
    secret_at = 32  # in the first of several tokens


_NO_LIBCRYPTO = TcpTransport.unavailable({"encrypt": True})


@pytest.mark.skipif(_NO_LIBCRYPTO is not None, reason=str(_NO_LIBCRYPTO))
@pytest.mark.usefixtures("_peers_find_support")
class TestTcpEncrypted(TransportContract):
    factory = "encrypted_tcp:transport"
    secret_at = 32  # in the first of several tokens


class TestLocal(TransportContract):
    factory = "p2pkv.transports.local:LocalTransport"
    crosses_processes = False


_NO_UCX = UcxTransport.unavailable()


@pytest.mark.skipif(_NO_UCX is not None, reason=str(_NO_UCX))
class TestUcx(TransportContract):
    factory = "p2pkv.transports.ucx:UcxTransport"
    secret_at = 16


@pytest.fixture
def _peers_find_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_nccl.__file__).parent), prepend=os.pathsep)


@pytest.mark.usefixtures("_peers_find_support")
class TestCudaIpcInHostMemory(TransportContract):
    factory = "cuda_ipc_transport:in_host_memory"
    secret_at = 87  # the last byte of the token for host memory


@pytest.mark.usefixtures("_peers_find_support")
class TestCudaIpcInDeviceMemory(TransportContract):
    factory = "cuda_ipc_transport:in_device_memory"  # of the emulated driver


@pytest.mark.usefixtures("_peers_find_support")
class TestNccl(TransportContract):
    factory = "fake_nccl:transport"  # NVIDIA's has never been seen at work
    secret_at = 56
