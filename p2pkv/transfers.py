"""The public names of transfers between named nodes; ``docs/transfers.md`` has the calls."""

from p2pkv.offers.handles import Grant, Offer, RowStatus, RowStatuses, Stowed
from p2pkv.offers.head_map import HeadMap, PageLayout
from p2pkv.offers.transfers import Transfers

__all__ = ["Grant", "HeadMap", "Offer", "PageLayout", "RowStatus", "RowStatuses", "Stowed", "Transfers"]
