"""The cluster's view, seen from outside: a router is no member, so it asks one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind
from p2pkv.directory.routers import SENDER
from p2pkv.directory.view import View, decode, encode
from p2pkv.errors import ControlError, ViewError
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)
_ANSWER_S = 1.0


class Lookout:
    """Knows the view that :meth:`look` saw last. Used by one thread; the client stays the caller's."""

    def __init__(self, join: Sequence[str], client: ControlClient) -> None:
        self._join = tuple(join)
        self._client = client
        self._log = LimitedLog(_log)
        self.view = View()

    def look(self) -> str | None:
        """Ask the members we know, then the join addresses, until one answers; return its address.

        None if nobody does, which takes a second for each. Raises :class:`~p2pkv.errors.ClosedError`.
        """
        addresses = [member.address for member in self.view.alive()]
        question = encode(SENDER, ())
        for address in dict.fromkeys([*addresses, *self._join]):
            reply = self._client.ask(Request(address, Kind.EXCHANGE, question), _ANSWER_S)
            if reply is not None and reply.ok:
                try:
                    self.view = View(decode(reply.body).members)
                except (ViewError, ControlError) as error:
                    self._log.warning(address, "the view of %s can't be read: %s", address, error)
                    continue
                return address
        return None
