"""The suites' clusters, pairs and networks end with what was started for them, all in the same way."""

from __future__ import annotations

from contextlib import ExitStack

from p2pkv.transports.base import Resource


class Holding(Resource):
    """Owns what is in ``_undo``, which a subclass fills when it is made, and closes it."""

    _undo: ExitStack

    def close(self) -> None:
        self._undo.close()
