"""What holds for all tests, before any of them imports anything."""

from __future__ import annotations

import os

# BLAS threads wait by spinning: on busy cores the demo's model is ten times slower with two than with one
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
