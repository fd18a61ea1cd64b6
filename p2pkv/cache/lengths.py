"""A page has one length wherever it is: whoever says another one hears so, before any byte is taken for the page."""

from __future__ import annotations

import numpy as np

from p2pkv import _native
from p2pkv.cache.call import PageCall
from p2pkv.errors import UsageError
from p2pkv.pool import Pool


def too_large(largest: int, pool: Pool) -> UsageError:
    """Return what to raise for a page that is larger than any that the pool takes."""
    return UsageError(
        f"a page of {largest} bytes does not fit the pool, which takes pages of up to {pool.largest_page}; raise "
        "pool_size"
    )


def check_published_lengths(pool: Pool, call: PageCall) -> None:
    """Raise :class:`UsageError` if the pool has a page of the call with another length."""
    found, locations = pool.lookup(call.ids)
    wrong = np.flatnonzero(found.astype(bool) & (locations["length"] != call.lengths.astype(np.uint64)))
    if len(wrong):
        page = int(wrong[0])
        raise _other_length(page, int(locations["length"][page]), int(call.lengths[page]))


def check_located_lengths(batch: _native.FetchBatch) -> None:
    """Raise :class:`UsageError` if a page of the batch was located with another length."""
    wrong = batch.find_other_length()
    if wrong is not None:
        raise _other_length(*wrong)


def _other_length(page: int, published: int, given: int) -> UsageError:
    return UsageError(
        f"page {page} was published with {published} bytes, the memory given for it has {given}; "
        "is something missing in the namespace?"
    )
