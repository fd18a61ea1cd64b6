"""The other process's end of transfers: what it offers, and where it lets puts go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pkv.node import Node
from p2pkv.offers.handles import RowSpans
from p2pkv.transfers import Grant
from p2pkv_bench.working_set import Destination, Source, checksums

_LEASE_S = 300.0
Calls = Sequence[tuple[str, int, int]]
"""A request, its first page or slot, and the number of its pages."""


def row_spans(address: int, first: int, n: int, page_nbytes: int) -> RowSpans:
    """Return the spans of neighbouring pages."""
    spans = np.empty((n, 2), np.int64)
    spans[:, 0] = address + (first + np.arange(n)) * page_nbytes
    spans[:, 1] = page_nbytes
    return spans


class FarTransfers:
    """Offers pages of a source, and grants slots of a destination of its own."""

    def __init__(self, node: Node, source: Source, nbytes: int) -> None:
        self._node = node
        self._source = source
        self._destination = Destination(nbytes)
        node.register_memory(self._destination.array)
        self._grants: list[tuple[Grant, int, int]] = []

    def offer(self, calls: Calls, page_nbytes: int) -> None:
        """Offer pages, for whoever gets them."""
        for request, page, n in calls:
            spans = row_spans(self._source.address, page, n, page_nbytes)
            self._node.transfers.offer(request, spans, lease=_LEASE_S)

    def grant(self, calls: Calls, page_nbytes: int) -> None:
        """Grant slots, for whoever puts to them."""
        for request, slot, n in calls:
            spans = row_spans(self._destination.address, slot, n, page_nbytes)
            grant = self._node.transfers.grant(request, spans, timeout=_LEASE_S)
            self._grants.append((grant, slot, n))

    def verify(self, pages: Sequence[int], page_nbytes: int) -> bool:
        """Return whether each grant has the pages from the given one on; ends the grants."""
        expected = self._source.pages(page_nbytes)
        slots = self._destination.slots(page_nbytes)
        is_right = True
        for (grant, slot, n), page in zip(self._grants, pages, strict=True):
            statuses = grant.wait(10.0)
            grant.revoke()
            same = np.array_equal(checksums(slots[slot : slot + n]), checksums(expected[page : page + n]))
            is_right = is_right and not statuses.any() and same
        self._grants.clear()
        return is_right
