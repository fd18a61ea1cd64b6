"""How much longer than on a quiet machine everything may take that is no promise."""

from __future__ import annotations

import os

from p2pkv.directory import client

PATIENCE = 12.0 if "RDMA_VM" in os.environ else 4.0
"""Tests name the time on a quiet machine, and grant this many times as much.

A busy one that is three times slower must do, and an emulated one may take half a minute to import p2pkv.
"""

# An owner that only waits for a processor shall not be left out.
client.SILENT_OWNER_S = 0.020 * PATIENCE
