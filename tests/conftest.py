"""Settings of all tests."""

import pytest

pytest.register_assert_rewrite(
    "p2pkv.testing.transport_contract", "p2pkv.testing.transport_faults", "p2pkv.testing.transport_fixtures"
)
