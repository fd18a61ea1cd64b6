"""Whether tcp can be encrypted on this machine."""

from __future__ import annotations

import pytest

from p2pkv.transports.native import TcpTransport

needs_libcrypto = pytest.mark.skipif(
    (missing := TcpTransport.unavailable({"encrypt": True})) is not None, reason=str(missing)
)
