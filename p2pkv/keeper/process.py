"""The keeper's process as a node sees it; ``p2pkv keeper`` runs one."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import threading
from contextlib import ExitStack, suppress

from p2pkv.errors import ConfigError
from p2pkv.keeper.memory import Keeper, PoolMemory
from p2pkv.keeper.packets import receive, send, user_of
from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_RETRY_S = 0.2
"""How often a node whose keeper has gone looks whether it is back."""


class ProcessKeeper(Keeper):
    """Keeps one pool's memory at the process that listens at a path, also when that is restarted while a node lives.

    A thread waits for its end, from when there is something to keep to :meth:`close`.
    """

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._log = LimitedLog(_log)
        self._lock = threading.RLock()  # held while a question is asked; guards what follows
        self._kept: PoolMemory | None = None
        self._is_lost = False
        self._thread: threading.Thread | None = None
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC)
        self._closing = threading.Event()
        try:
            self._connection = self._connect()
        except ConfigError:
            self._close_pipe()
            raise
        except OSError as error:
            self._close_pipe()
            raise ConfigError(
                f"keeper is 'unix:{path}', and no keeper answers there: {error.strerror or error}; start one with "
                f"p2pkv keeper unix:{path}, or leave keeper out"
            ) from error

    @property
    def is_keeping(self) -> bool:
        return self._kept is not None and not self._is_lost

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as undo:
            undo.callback(connection.close)
            connection.settimeout(_ANSWER_S)
            connection.connect(self._path)
            if user_of(connection) != os.geteuid():
                raise ConfigError(
                    f"keeper is 'unix:{self._path}', and another user's process listens there; it would be given this "
                    "node's pages, to write to as well: name a path in a folder of mode 0700 that is this user's"
                )
            undo.pop_all()
        return connection

    def _ask(self, verb: str, memory: PoolMemory | None = None) -> PoolMemory | None:
        with self._lock:
            send(self._connection, f"1 {verb} {self._name}", memory)
            text, fds = receive(self._connection)
        if text.startswith("REFUSED") or not text:
            for fd in fds:  # no keeper sends some along
                os.close(fd)
            raise OSError(text.removeprefix("REFUSED ") or "it has hung up")
        return PoolMemory(*fds) if len(fds) == 2 else None

    def take(self) -> PoolMemory | None:
        memory = self._must("GIVE")
        if memory is not None:
            self._watch(memory)
        return memory

    def keep(self, memory: PoolMemory) -> None:
        self._must("KEEP", memory)
        self._watch(memory)

    def _watch(self, memory: PoolMemory) -> None:
        """Have it in hand, to give it to a keeper that was restarted."""
        with self._lock:
            self._let_go()
            self._kept = PoolMemory(*(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in memory))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="p2pkv-keeper", daemon=True)
                self._thread.start()

    def drop(self) -> None:
        with self._lock:
            self._let_go()
        self._must("DROP")

    def _must(self, verb: str, memory: PoolMemory | None = None) -> PoolMemory | None:
        try:
            return self._ask(verb, memory)
        except OSError as error:
            raise ConfigError(f"the keeper at unix:{self._path} does not answer: {error}") from error

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _run(self) -> None:
        while not self._closing.is_set():
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            poll.register(self._connection, select.POLLRDHUP)
            poll.poll()
            if not self._closing.is_set():
                self._is_lost = True
                _log.warning("the keeper at unix:%s has gone; it is looked for", self._path)
                self._find_again()

    def _find_again(self) -> None:
        while not self._closing.wait(_RETRY_S):
            try:
                connection = self._connect()
            except ConfigError as error:
                self._log.error("stranger", "%s", error)
                continue
            except OSError:
                continue
            with self._lock:
                self._connection.close()
                self._connection = connection
                kept = self._kept
                try:
                    if kept is not None:
                        self._ask("KEEP", kept)
                except OSError as error:
                    self._log.warning(None, "the keeper at unix:%s keeps nothing: %s", self._path, error)
                    continue
            self._is_lost = False
            _log.info("the keeper at unix:%s has the pool's memory again", self._path)
            return

    def close(self) -> None:
        """Let go of the keeper, which has what was left with it. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake, b"x")
        if self._thread is not None:
            self._thread.join()
        if self._kept is not None and self._is_lost:
            _log.warning(
                "the keeper at unix:%s does not have it: what lies in the pool ends with this process",
                self._path,
            )
        self._connection.close()
        self._let_go()
        self._close_pipe()

    def _close_pipe(self) -> None:
        for fd in (self._woken, self._wake):
            with suppress(OSError):
                os.close(fd)
