"""What ends a benchmark early."""

from __future__ import annotations

from p2pkv.errors import P2PKVError


class BenchError(P2PKVError):
    """The benchmark could not be run to its end, or saw wrong bytes."""
