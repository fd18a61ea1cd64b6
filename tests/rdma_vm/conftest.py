"""Where there is RDMA, nothing may be skipped: in the virtual machine a skip is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn skips into failures if ``vm.py`` runs this."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.skipped and "RDMA_VM" in os.environ:
        report.outcome = "failed"
        report.longrepr = f"skipped where it must not be: {report.longrepr}"
