"""The contract suite over verbs: both devices as two rails, and one device alone."""

from __future__ import annotations

import pytest

from p2pkv.testing.transport_contract import TransportContract
from p2pkv.transports.verbs import VerbsTransport

_missing = VerbsTransport.unavailable()
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"verbs: {_missing}")


class TestVerbs(TransportContract):
    factory = "p2pkv.transports.verbs:VerbsTransport"
    secret_at = 10  # the highest byte of the nonce
    survives_a_closed_region = False
    churn_pause = 0.005  # an emulated machine reads a batch in 0.1 s


@pytest.mark.slow  # the nodes of test_verbs_nodes.py have one device each
class TestVerbsOverOneRail(TransportContract):
    factory = "tests.rdma_vm.one_rail:one_rail"
    secret_at = 10
    survives_a_closed_region = False
    churn_pause = 0.005  # an emulated machine reads a batch in 0.1 s
