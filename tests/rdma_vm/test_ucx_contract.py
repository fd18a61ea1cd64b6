"""The contract suite over ucx on RDMA: what Debian's libucp makes of a Soft-RoCE device."""

from __future__ import annotations

import pytest

from p2pkv.testing.transport_contract import TransportContract
from tests.rdma_vm import over_ucx

_missing = over_ucx.unavailable()
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"ucx over RDMA: {_missing}")


class TestUcxOverRdma(TransportContract):
    factory = "tests.rdma_vm.over_ucx:over_rdma"
    secret_at = 16
    churn_pause = 0.03  # an emulated machine reads a batch in 0.2 s or more
    # a step of UCX that makes queue pairs and registers buffers takes 0.17 s on a fast and quiet machine
    slack = 2.0
    notices_deaths = False
    n_cycles = 20
