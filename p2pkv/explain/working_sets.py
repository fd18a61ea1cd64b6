"""Brings the working sets of a cluster's members together: what each published and found, and which pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from p2pkv.directory.view import Member
from p2pkv.explain.messages import Answer, Question
from p2pkv.limited_log import LimitedLog
from p2pkv.metrics.working_set import Share, together

_log = logging.getLogger(__name__)

_ANSWER_S = 2.0


class WorkingSets:
    """Asks the other members for their shares. One of a cluster does so: the first one, by node id, that has a pool."""

    def __init__(
        self,
        node_id: str,
        present: Callable[[], Iterable[Member]],
        ask: Callable[[Question, float], Sequence[Answer]],
    ) -> None:
        """``present`` returns the members, this node among them; ``ask`` what the others answer in so many seconds."""
        self._node_id = node_id
        self._present = present
        self._ask = ask
        self._log = LimitedLog(_log)

    def gather(self) -> list[Share] | None:
        """Return the shares of those who answer; None if another member asks. Blocks for two seconds at most."""
        first = min((member.node_id for member in self._present() if member.weight > 0), default=None)
        return list(self._shares()) if first == self._node_id else None

    def _shares(self) -> Iterator[Share]:
        for answer in self._ask(Question(working_set=True), _ANSWER_S):
            told = answer.working_set
            if told is None:  # it has no pool, or is too old for the question
                continue
            share = Share(told.published, told.found, told.registers)
            try:
                together([share])
            except ValueError as error:
                self._log.warning(
                    str(error), "the working set of node %s is left out: %s", answer.node_id, error
                )
                continue
            yield share
