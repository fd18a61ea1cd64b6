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
_MOST_REMEMBERED = 512
"""Lives of nodes, of 16 KiB each; those go first that were told of longest ago."""


class WorkingSets:
    """Asks the other members for their shares. One of a cluster does so: the first one, by node id, that has a pool.

    It remembers what was told by nodes that have gone since, or were restarted: what they published and found was
    published and found. Used by one thread.
    """

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
        self._told: dict[tuple[str, int], Share] = {}

    def gather(self) -> list[Share] | None:
        """Return the shares of all who have answered; None if another member asks. Blocks for two seconds at most."""
        present = list(self._present())
        if min((member.node_id for member in present if member.weight > 0), default=None) != self._node_id:
            self._told.clear()
            return None
        boots = {member.node_id: member.boot_epoch for member in present}
        for node_id, share in self._shares():
            life = node_id, boots.get(node_id, 0)
            self._told.pop(life, None)
            self._told[life] = share
        while len(self._told) > _MOST_REMEMBERED:
            del self._told[next(iter(self._told))]
        return list(self._told.values())

    def _shares(self) -> Iterator[tuple[str, Share]]:
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
            yield answer.node_id, share
