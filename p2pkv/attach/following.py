"""The view of an engine that is no member: it asks its host's node, and others while that is silent.

With it it asks which routers there are, since those tell members only.

An attached engine takes no part in membership: nobody probes it, nothing is kept for it, and its end is no event. It
needs to know who the members are all the same, because it asks their shards and reads their pools itself.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from random import Random

from p2pkv.attach.unsettled import Unsettled
from p2pkv.control.silence import tell_why_silent
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import PROBE_REPLY, Kind
from p2pkv.directory.view import Member, View, decode, encode
from p2pkv.errors import ClosedError, ControlError
from p2pkv.limited_log import QUIET_S, LimitedLog
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Between two looks whether the view is another one; so long an engine may be behind its node."""
_WHOLE_S = 2.0
"""Between two times that the view is asked for whether or not its digest is another one: that leaves suspicions out."""
_ANSWER_S = 0.5
SILENT_S = 5.0
"""How long the host's node may be silent, while its socket says that it is there, before the log says so; a guess."""
_SENDER = "p2pkv-attached"
"""What an engine calls itself in a view without members, which teaches nobody anything."""


class Following(Resource):
    """Knows the view from :meth:`look` on; a thread keeps it from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        client: ControlClient,
        on_change: Callable[[View, View], None],
        on_confirmed: Callable[[], None],
        take_routers: Callable[[bytes], None],
        unsettled: Unsettled,
        *,
        cluster: str,
    ) -> None:
        """``on_change`` is called with the view before and the new one, ``on_confirmed`` after each look.

        ``take_routers`` is shown what the host's node knows of routers, and ``unsettled`` that it has the same view,
        and each look. ``cluster`` is the name of the node's; views of others are dropped, whoever has its address now.
        """
        self._client = client
        self._on_change = on_change
        self._on_confirmed = on_confirmed
        self._take_routers = take_routers
        self._unsettled = unsettled
        self._cluster = cluster
        self._log = LimitedLog(_log)
        self._random = Random()  # noqa: S311 - whom to ask, nothing secret
        self._address = ""
        self._asked_whole = 0.0
        self._lock = threading.RLock()  # held while the view changes, or is confirmed
        self._taken_as_of = 0.0  # when the view was asked for that was taken last; with the lock
        self.view = View()
        self.is_attached: Callable[[], bool] = lambda: False
        """Whether the host's node is there, by its socket: who is away, and so silent, is spoken of elsewhere."""
        self.is_silent = False
        """Whether the host's node lets this engine attach, and answers nothing that it asks for a while."""
        self._silent_since: float | None = None  # when it was asked first of what it has not answered
        self._told_silence = -math.inf
        self._wanted = threading.Event()
        self._n_wanted = self._n_reported = 0  # times that the same view is to be reported, and was
        self._closing = False
        self._thread: threading.Thread | None = None

    def look(self, address: str, timeout: float) -> None:
        """Take the view of the host's node, whose control socket is at ``address``.

        Raises :class:`~p2pkv.errors.ControlError` if it does not answer within ``timeout`` seconds.
        """
        self._address = address
        if not self._take_from(address, timeout):
            raise ControlError(
                f"the host's node does not answer at {address}: an engine that attaches needs its secret_file, too"
            )

    def look_again(self, deadline: float) -> None:
        """Take the view of the host's node as it is now; if it does not answer soon the old one stays.

        Most of a short call is left for what the view is needed for.
        """
        self._take_from(self._address, min(_ANSWER_S, max(0.0, deadline - time.monotonic()) / 4))

    def follow(self, address: str) -> None:
        """Ask there from now on, and soon: the host's node has come back."""
        self._address = address
        self._asked_whole = 0.0
        self._wanted.set()

    def say_again(self) -> None:
        """Have the thread report the same view soon: its owner makes something else of it now."""
        self._n_wanted += 1
        self._wanted.set()

    def start(self) -> None:
        """Go on looking."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-following", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._wanted.wait(_LOOK_S)
            self._wanted.clear()
            if self._closing:
                return
            try:
                self._turn()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(
                    type(error).__name__, "the view was not asked for; trying again", exc_info=error
                )

    def _turn(self) -> None:
        n_wanted = self._n_wanted
        if n_wanted != self._n_reported:
            with self._lock:
                self._on_change(self.view, self.view)
            self._n_reported = n_wanted
        self._unsettled.tell_due()
        asked = time.monotonic()
        is_known = self._is_same(self._address)
        self._note_silence(None if is_known is not None or not self.is_attached() else asked)
        if is_known is None:  # it does not answer: somebody else may know what has become of it
            others = [member.address for member in self.view.present() if member.address != self._address]
            if others:
                self._take_from(self._random.choice(others), _ANSWER_S)
        elif is_known and time.monotonic() - self._asked_whole <= _WHOLE_S:
            return
        elif self._take_from(self._address, _ANSWER_S):
            self._ask_routers()

    def _note_silence(self, asked: float | None) -> None:
        """Take note that what was asked then was not answered; None: it was, or the node is away.

        Only looks count: between two of them this process may have stood still, or its interpreter been held.
        """
        if asked is None:
            self._silent_since, self.is_silent = None, False
            return
        if self._silent_since is None:
            self._silent_since = asked
        self.is_silent = asked - self._silent_since > SILENT_S
        if self.is_silent:
            self._tell_silence()

    def _tell_silence(self) -> None:
        """Say why, once a minute. Its socket asks for no secret, so that one that has another one looks attached."""
        now, address = time.monotonic(), self._address
        if now - self._told_silence < QUIET_S:
            return
        self._told_silence = now

        def tell(why: str) -> None:
            _log.warning(
                "the host's node lets this engine attach, and does not answer it at %s: %s; until it does nothing is "
                "published, and what is fetched may be missed",
                address,
                why,
            )

        tell_why_silent(address, tell)

    def _ask_routers(self) -> None:
        reply = self._client.ask(Request(self._address, Kind.ROUTERS), _ANSWER_S)
        if reply is None or not reply.ok or not reply.body:
            return  # a node that has heard of none, or of a version that knows nothing of them
        try:
            self._take_routers(reply.body)
        except ControlError as error:
            self._log.warning(self._address, "%s told of %s", self._address, error)

    def _is_same(self, address: str) -> bool | None:
        """Whether the view there has the digest of this one; None if nobody answers."""
        mark = self._unsettled.ask()
        reply = self._client.ask(Request(address, Kind.PROBE), _ANSWER_S)
        if reply is None or not reply.ok or len(reply.body) != PROBE_REPLY.size:
            return None
        with self._lock:  # else what a bump's look takes meanwhile would be replaced by what is confirmed
            is_same: bool = PROBE_REPLY.unpack(reply.body)[1] == self.view.digest
            if is_same:
                self._unsettled.settle(mark)
                self._on_confirmed()
        return is_same

    def _take_from(self, address: str, timeout: float) -> bool:
        asked = time.monotonic()
        reply = self._client.ask(Request(address, Kind.EXCHANGE, encode(_SENDER, ())), timeout)
        if reply is None or not reply.ok:
            return False
        try:
            report = decode(reply.body)
        except ControlError as error:
            self._log.warning(address, "%s told a view that can't be used: %s", address, error)
            return False
        members = report.members
        if not members:
            return False  # a node that has just begun knows nobody, itself included
        if report.cluster != self._cluster:  # its pages may have the same keys and be other bytes
            self._log.warning(
                address,
                "node %s at %s is of cluster %r, this engine of cluster %r; the two stay apart",
                report.sender,
                address,
                report.cluster,
                self._cluster,
            )
            return False
        with self._lock:
            if asked < self._taken_as_of:
                return True  # another thread has asked later, and been answered already
            self._taken_as_of = asked
            self._asked_whole = time.monotonic()
            self._take(View(_newer(member, self.view.get(member.node_id)) for member in members))
        return True

    def _take(self, new: View) -> None:
        """Have it told, then show it, as membership does: who is in no view any more counts as given up by then."""
        old = self.view
        if dict(old) != dict(new):
            self._on_change(old, new)  # if it raises, the next turn tells it again
            self.view = new
        self._on_confirmed()

    def interrupt(self) -> None:
        """Look no more."""
        self._closing = True
        self._wanted.set()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()


def _newer(told: Member, known: Member | None) -> Member:
    """Return of two records the one of the later boot: who tells may not have heard of that yet."""
    return known if known is not None and known.boot_epoch > told.boot_epoch else told
