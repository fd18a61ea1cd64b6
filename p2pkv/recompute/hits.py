"""What is decided about: the run of pages of a prompt that others have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.recompute.rates import Source


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Pages that can be fetched, from the first token that is not here on, without a gap."""

    sources: Sequence[Source]
    of_page: NDArray[np.int64]
    """``(n,)``: which of the sources has each page."""
    nbytes: NDArray[np.int64]
    """``(n,)``: bytes of each page."""
    page_tokens: int
    """Tokens of a page."""
    first_token: int
    """How many tokens of the prompt are here already."""
    n_tokens: int
    """Tokens of the whole prompt."""

    def __post_init__(self) -> None:
        if len(self.of_page) != len(self.nbytes):
            raise UsageError(f"{len(self.of_page)} pages have sources, and {len(self.nbytes)} have lengths")
        if len(self) and not 0 <= int(self.of_page.min()) <= int(self.of_page.max()) < len(self.sources):
            raise UsageError(f"a page is of a source that is none of the {len(self.sources)} given")
        if self.page_tokens < 1 or self.first_token < 0:
            raise UsageError(f"pages of {self.page_tokens} tokens after {self.first_token} are none")
        if self.first_token + len(self) * self.page_tokens > self.n_tokens:
            raise UsageError(
                f"{len(self)} pages of {self.page_tokens} tokens after {self.first_token} are more than the "
                f"prompt's {self.n_tokens}"
            )

    def __len__(self) -> int:
        return len(self.of_page)

    def used(self) -> list[Source]:
        """Return the sources that have any of the pages."""
        return [self.sources[i] for i in np.unique(self.of_page).tolist()]

    def bytes_of(self, source: int) -> NDArray[np.int64]:
        """Return ``(n + 1,)``: what comes from a source if the first 0, 1, ... pages are fetched."""
        of_it = np.where(self.of_page == source, self.nbytes, 0)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(of_it)])
