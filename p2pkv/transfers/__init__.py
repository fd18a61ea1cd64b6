"""Bytes that go from one named node to another: offers, grants and pulls. ``docs/transfers.md`` has the calls."""

from p2pkv.transfers.heads import HeadMap, PageLayout
from p2pkv.transfers.requests import Grant, Offer, RowStatus, RowStatuses
from p2pkv.transfers.transfers import Transfers

__all__ = ["Grant", "HeadMap", "Offer", "PageLayout", "RowStatus", "RowStatuses", "Transfers"]
