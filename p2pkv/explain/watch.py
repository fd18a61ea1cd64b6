"""Notices a node that asks for much and finds nothing with anybody: mostly its namespace is not what its peers publish.

Then each page is a miss, no call fails, and nothing else says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from p2pkv.errors import ClosedError
from p2pkv.explain.messages import Answer, Question
from p2pkv.explain.namespaces import nearest
from p2pkv.limited_log import LimitedLog
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TURN_S = 10.0
_ENOUGH = 1000
"""Pages that were asked of peers, and not one found, before they are asked for their namespaces. A guess: a server that
starts cold asks for as many in its first seconds, and then there are peers with its namespace, and nothing is said."""
_ANSWER_S = 2.0

Seen = tuple[float, float]
"""How many pages peers were asked for so far, and how many were found."""


class NamespaceWatch(Resource):
    """Looks every ten seconds, in a thread from :meth:`start` to :meth:`close`; :meth:`turn` is one look."""

    def __init__(
        self, namespace: str, seen: Callable[[], Seen], ask: Callable[[Question, float], list[Answer]]
    ) -> None:
        self._namespace = namespace
        self._seen = seen
        self._ask = ask
        self._log = LimitedLog(_log)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._before: Seen = (0.0, 0.0)
        self._streak = 0.0
        self._fruitless = 0.0
        self._n_peers = 0

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-namespaces", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(_TURN_S):
            try:
                self.turn()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "peers' namespaces were not asked for", exc_info=error)

    def turn(self) -> None:
        """Count what was in vain since the last turn; ask the peers if that is enough, and say what differs."""
        asked, found = self._seen()
        has_found = found > self._before[1]
        in_vain = 0.0 if has_found else asked - self._before[0]
        self._before = (asked, found)
        self._fruitless += in_vain
        self._streak = 0.0 if has_found else self._streak + in_vain
        if not in_vain or self._streak < _ENOUGH:
            return
        answers = self._ask(Question(), _ANSWER_S)
        self._n_peers = sum(answer.namespace == self._namespace for answer in answers)
        if answers and not self._n_peers:
            self._say(answers)

    def _say(self, answers: list[Answer]) -> None:
        closest = nearest(self._namespace, sorted({answer.namespace for answer in answers}))
        assert closest is not None
        whose = sorted(answer.node_id for answer in answers if answer.namespace == closest.namespace)
        self._log.warning(
            closest.namespace,
            "not one of the last %d pages asked of peers was found, and none of %d peers has the namespace of this "
            "node, %r: pages are shared only where it is the same. Nearest is %r of %s: %s",
            self._streak,
            len(answers),
            self._namespace,
            closest.namespace,
            ", ".join(whose[:3]) + (" and others" if len(whose) > 3 else ""),
            closest,
        )

    def readings(self) -> dict[str, float]:
        """Return what the metrics show, by name."""
        return {
            "p2pkv_fruitless_look_ups_total": self._fruitless,
            "p2pkv_namespace_peers": self._n_peers,
        }

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
