"""Values of the data path: keys, locations and outcomes, one numpy row a page."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Keys = NDArray[np.uint8]
"""``(n, 16)``: hashed page keys (see :func:`hash_keys`)."""

LOCATION = np.dtype(
    [
        ("owner", "<u8"),  # node key: the first 8 bytes of BLAKE2b of the node id
        ("boot", "<u8"),  # boot epoch of the owner
        ("offset", "<u8"),  # of the page in the owner's region
        ("length", "<u8"),
        ("word_offset", "<u8"),  # of the page's generation word in the owner's region
        ("generation", "<u8"),  # what that word holds while the page is there; even
        ("checksum", "<u8"),
        ("region", "<u4"),
        ("flags", "<u4"),
    ]
)
"""Where a page lies: 64 bytes, the same in Python, C++ and on the wire."""

RESIDENT = 1
"""Flag of a location: the page is in the owner's pool."""


class Outcome(IntEnum):
    """What became of one page of a call. Every doubt is a ``MISS``."""

    MISS = 0
    """Not there, not provably right, or not in time. The memory given for it holds anything."""
    HIT = 1
    """Fetched: the bytes are exactly those published. Exists: some live node has it. Published: it can be fetched."""
