"""How much longer than on a quiet machine everything may take that is no promise."""

from __future__ import annotations

import os

from p2pkv import Node
from p2pkv.directory import asking
from p2pkv.directory.membership.timing import Timing

PATIENCE = 12.0 if "RDMA_VM" in os.environ else 4.0
"""Tests name the time on a quiet machine, and grant this many times as much.

A busy one that is three times slower must do, and an emulated one may take half a minute to import p2pkv.
"""

# An owner that only waits for a processor shall not be left out. With 80 ms one test in a hundred missed what was
# there, on two cores that twelve threads wanted.
asking.SILENT_OWNER_S = 0.050 * PATIENCE

if "RDMA_VM" in os.environ:
    # A vCPU that the host takes away for half a second is no dead node; who flaps all the time reads nothing.
    Node._timing = Timing(probe_interval=2.0, probe_timeout=1.9, suspicion=8.0, lateness_tolerance=1.5)
