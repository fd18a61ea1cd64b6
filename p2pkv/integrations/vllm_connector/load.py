"""One load: what it asks of prefill, and which of its blocks are proven right when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2pkv.integrations.vllm_connector.handoff import Rank
from p2pkv.integrations.vllm_connector.wants import Wants
from p2pkv.offers.handles import RowStatuses
from p2pkv.transfers import Grant, RowStatus


@dataclass(slots=True)
class Ask:
    """Rows of one offer, asked for of the node that made it."""

    rank: Rank
    name: str
    rows: NDArray[np.int64]
    first_row: int
    owners: NDArray[np.int64]
    """The block that each row is of; none if nobody needs the bytes."""
    layers: frozenset[str] | None = None
    """The layers that the rows are of; None: it may be any."""
    grant: Grant | None = None
    """None: not asked for yet."""
    has_come: bool = False
    """Whether :meth:`came` has seen all of it."""
    had: NDArray[np.bool_] | None = None
    """The rows that came before it was asked for once more: they are offered no more."""

    @property
    def is_done(self) -> bool:
        return self.grant is None or self.grant.done()

    @property
    def is_lost(self) -> bool:
        """Whether it may be had if it is asked for once more: the way was lost, or prefill has just stowed it."""
        if self.grant is None or not len(self.owners):
            return False
        return bool(np.isin(self.grant.statuses(), (RowStatus.PEER_LOST, RowStatus.REJECTED)).any())

    def keep(self) -> None:
        """Keep what has come: it is about to be asked for once more."""
        if self.grant is not None:
            self.had = self.end() == RowStatus.OK

    def _with_had(self, statuses: RowStatuses) -> RowStatuses:
        return statuses if self.had is None else np.where(self.had, np.uint8(RowStatus.OK), statuses)

    def came(self, deadline: float) -> bool:
        """Block until all is here, and say whether it is; at most until the deadline."""
        if self.grant is not None and not self.has_come:
            statuses = self._with_had(self.grant.wait(max(0.0, deadline - time.monotonic())))
            self.has_come = bool((statuses == RowStatus.OK).all())
        return self.has_come

    def end(self) -> RowStatuses:
        """Have nothing written any more, and return what came."""
        return (
            np.full(len(self.rows), RowStatus.PENDING, np.uint8)
            if self.grant is None
            else self._with_had(self.grant.revoke())
        )


@dataclass(slots=True)
class Load:
    """Blocks count as loaded only once they are in ``proven``: whatever goes wrong anywhere, they are not."""

    request_id: str
    block_ids: set[int]
    """Of all groups: a block is of one at a time."""
    is_awaited: bool
    """Whether the request waits for the end."""
    began: float
    deadline: float
    is_handoff: bool
    stream: int | None
    """Whose work of before the load is done before anything is written to the blocks."""
    asks: list[Ask] = field(default_factory=list)
    """All of them, before the first one is asked: a block is proven by all rows that are of it."""
    wants: Wants | None = None
    """What prefill is told, if it can't know what to offer."""
    is_by_layer: bool = False
    """Whether the step that it began in computes with it."""
    n_repeats: int = 0
    is_revoked: bool = False
    is_spoilt: bool = False
    """What comes is of no use, however right its bytes are."""
    proven: set[int] = field(default_factory=set)
    nbytes: int = 0
    """Proven."""
    why: str = ""
    """What went wrong first."""
    is_refused: bool = False
    """Whether it has failed even if there is no block that is not proven."""

    @property
    def is_unheard(self) -> bool:
        """Whether prefill offers nothing of what is asked for: what it was to be told is lost with the way to it."""
        return self.wants is not None and self.wants.is_lost and not all(ask.is_done for ask in self.asks)

    @property
    def is_refused_by_prefill(self) -> bool:
        """Whether something is asked for that will never be offered."""
        refusing = set() if self.wants is None else self.wants.refusing()
        # looked at after the refusals: what was taken before a hand-off ended is here by now
        return any(ask.rank.node_id in refusing and not ask.is_done for ask in self.asks)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more will come unless it is asked for once more."""
        return self.is_unheard or all(ask.is_done for ask in self.asks)

    @property
    def failed(self) -> set[int] | None:
        """The blocks that are not proven; None if the load is right."""
        failed = self.block_ids if self.is_spoilt else self.block_ids - self.proven
        return failed if failed or self.is_spoilt or self.is_refused else None

    def spoil(self, why: str) -> None:
        """Have it fail whatever comes, as when the weights have changed since."""
        self.is_spoilt, self.why = True, why

    def waits_for(self, layer: str | None) -> bool:
        """Block until a layer is there, None for all of them; say whether it is. At most until the deadline."""
        needed = [ask for ask in self.asks if layer is None or ask.layers is None or layer in ask.layers]
        return not self.is_refused and all(ask.came(self.deadline) for ask in needed)

    def settle(self) -> None:
        """Have nothing written any more, and take what came for proven."""
        owners, statuses = [], []
        for ask in self.asks:
            if len(ask.owners):
                owners.append(ask.owners)
                statuses.append(ask.end())
                self.nbytes += int(ask.rows[statuses[-1] == RowStatus.OK, 1].sum())
        if owners:
            of_row, status = np.concatenate(owners), np.concatenate(statuses)
            is_wrong = status != RowStatus.OK
            self.proven.update(np.setdiff1d(of_row, of_row[is_wrong]).tolist())
            if is_wrong.any():
                worst = RowStatus(int(status[is_wrong][0]))
                self.why = self.why or worst.name.lower().replace("_", " ")
