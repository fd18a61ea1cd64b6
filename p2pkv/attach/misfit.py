"""Pages that the host's node can't store, whatever room it makes."""

from __future__ import annotations

from p2pkv.errors import UsageError


def misfit(page: int, given: int, published: int) -> UsageError:
    """Return what to raise for a page of ``given`` bytes; ``published``: how many it has in the pool, or 0."""
    if published:
        return UsageError(
            f"page {page} was published with {published} bytes, the memory given for it has {given}; is "
            "something missing in the namespace?"
        )
    return UsageError(
        f"a page of {given} bytes does not fit the pool of the host's node; raise its pool_size"
    )
