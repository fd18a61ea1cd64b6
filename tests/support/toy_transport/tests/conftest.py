"""Failures of the contract suite show what was compared."""

import pytest

pytest.register_assert_rewrite("p2pkv.testing.transport_contract", "p2pkv.testing.transport_faults")
