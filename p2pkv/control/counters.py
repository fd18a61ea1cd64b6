"""A node's counters on the wire, for whoever has the cluster's secret and asks: ``p2pkv top`` does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from p2pkv.errors import ControlError


def encode_counters(counters: Mapping[str, float]) -> bytes:
    """Build the answer to a COUNTERS."""
    return msgspec.msgpack.encode({name: float(value) for name, value in counters.items()})


def decode_counters(body: bytes) -> dict[str, float]:
    """Read the answer to a COUNTERS. Raises :class:`~p2pkv.errors.ControlError` for what no node could have sent."""
    try:
        counters = msgspec.msgpack.decode(body, type=dict[str, float])
    except msgspec.DecodeError as error:  # a body of wrong types raises a subclass
        raise ControlError(f"the answer to a question for counters can't be read: {error}") from error
    if not all(map(math.isfinite, counters.values())):
        raise ControlError("the answer to a question for counters has a number that is none")
    return counters
