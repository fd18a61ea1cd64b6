"""A node's socket for the engines of its host. What comes over it is answered by native threads.

The socket lies in a folder that only this user can enter, and its mode lets only this user connect; who connects is
asked for by the kernel besides. A path that a killed node has left is taken over; one that is in use is not. Where the
path is removed under a node, by what tidies up or a user's logging out, it listens there again within a second or so.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.limited_log import LimitedLog
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_TAKE_S = 5.0
"""How long a start waits for a node that is ending to leave the path: the memory of one that was killed is torn down
first, which takes a tenth of a second a GiB."""
_LOOK_S = 0.05
_WAITING = 64
"""How many engines may wait to be let in."""
PATH_LOOK_S = 1.0
"""Between two looks whether the path is still there."""


class EngineSocket(Resource):
    """Listens at a path, from construction to :meth:`close`. Raises :class:`ConfigError` where it can't."""

    def __init__(self, path: str, setting: str = "attach_listen", who: str = "node") -> None:
        """``setting`` is what errors call it, and ``who`` the like of who listens."""
        self.path = path
        self._setting, self._who = setting, who
        _require_private_folder(Path(path).parent, setting)
        deadline = time.monotonic() + _TAKE_S
        while (why := self._bind()) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{setting} is 'unix:{path}': {why}")
            time.sleep(_LOOK_S)

    def _bind(self) -> str | None:
        """Listen, or say why another node has the path."""
        try:
            # Between its bind and its listen a node looks like one that is gone.
            with _alone_in(Path(self.path).parent) as is_alone:
                if is_alone:
                    return self._bind_alone()
        except OSError as error:
            raise self._cannot(error) from error
        return "another node takes a path in its folder at the moment, and does not come to an end with that"

    def _cannot(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._setting} is 'unix:{self.path}': cannot listen there: {error.strerror or error}"
        )

    def _bind_alone(self) -> str | None:
        if self._listen():
            return None
        in_the_way = self._clear()
        if in_the_way is None and not self._listen():
            return "somebody has taken it meanwhile"
        return in_the_way

    def _listen(self) -> bool:
        """Listen, unless something lies there."""
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            try:
                listener.bind(self.path)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return False
            os.chmod(self.path, 0o600)
            listener.listen(_WAITING)
            self._file = _file_at(self.path)
            self.socket = listener
            undo.pop_all()
        return True

    def _clear(self) -> str | None:
        """Remove what a node has left that is gone, or say what is in the way."""
        try:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(
                    f"{self._setting} is 'unix:{self.path}': something that is no socket lies there"
                )
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
                visitor.settimeout(1.0)
                visitor.connect(self.path)
        except ConnectionRefusedError:
            os.unlink(self.path)
        except FileNotFoundError:
            pass  # its node has ended just now
        except OSError as error:
            return f"whoever listens there does not answer: {error.strerror or error}"
        else:
            return f"another {self._who} listens there; give each {self._who} of a host a path of its own"
        return None

    @property
    def is_found(self) -> bool:
        """Whether who looks at the path finds this socket there."""
        try:
            return _file_at(self.path) == self._file
        except OSError:
            return False

    def listen_again(self) -> None:
        """Listen anew where somebody has removed the path. Raises :class:`ConfigError` where it can't, for now."""
        _require_private_folder(Path(self.path).parent, self._setting)
        before = self.socket
        if (why := self._bind()) is not None:
            raise ConfigError(f"{self._setting} is 'unix:{self.path}': {why}")
        before.close()  # who waited to be let in there comes again

    def close(self) -> None:
        """Let nobody in any more, and leave the path to others. Idempotent."""
        if self.socket.fileno() < 0:
            return
        # Closed only then: as long as this node listens nobody takes the path over, and no other file has its inode.
        if self.is_found:
            # Somebody removes it at this moment, or nobody can any more: then it is the next node's to clear.
            with suppress(OSError):
                os.unlink(self.path)
        self.socket.close()


def _file_at(path: str) -> tuple[int, int]:
    """Return what no other file is while this one is open: its number, and whose, since each /run/user begins at 1."""
    info = os.stat(path)
    return info.st_dev, info.st_ino


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Keep others from taking a path in the folder; False if one is at that. The kernel lets go for who dies."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
    finally:
        os.close(fd)


def _require_private_folder(folder: Path, setting: str) -> None:
    """Make the folder, unless it is there, and refuse one that others can enter."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot use the folder {folder}: {error.strerror}") from error
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"{setting}: the folder {folder} has mode {stat.S_IMODE(info.st_mode):04o} and belongs to user "
            f"{info.st_uid}; it has to be this user's, with mode 0700: what lies in it leads to every page of this node"
        )


class PathWatch:
    """Has a socket listen again where its path was removed, and says so in the log; :meth:`look` is one look."""

    def __init__(self, listener: EngineSocket, who: str) -> None:
        """``who`` is whom nobody finds meanwhile, as the log calls it."""
        self._socket, self._who = listener, who
        self._log = LimitedLog(_log)

    def look(self) -> bool:
        """Return whether it had to listen anew, and does."""
        if self._socket.is_found:
            return False
        try:
            self._socket.listen_again()
        except (ConfigError, OSError) as error:
            self._log.warning(
                "path",
                "unix:%s was removed, and who comes now does not find %s until it can listen there again: %s",
                self._socket.path,
                self._who,
                error,
            )
            return False
        _log.warning("unix:%s was removed; %s listens there again", self._socket.path, self._who)
        return True


class Host(Resource):
    """Serves the engines that attach, from construction to :meth:`close`. A thread looks after the path."""

    def __init__(self, path: str, start: Callable[[int], _native.AttachHost]) -> None:
        """``start`` makes the native side of a socket that listens, which it duplicates."""
        self._closing = threading.Event()
        with ExitStack() as undo:
            self._socket = EngineSocket(path)
            undo.callback(self._socket.close)
            try:
                self._native = start(self._socket.socket.fileno())
            except RuntimeError as error:
                raise ConfigError(f"attach_listen is 'unix:{path}': {error}") from error
            undo.callback(self._native.close)
            self._thread = threading.Thread(
                target=self._run,
                args=(PathWatch(self._socket, "this node"),),
                name="p2pkv-attach-at",
                daemon=True,
            )
            self._thread.start()
            undo.pop_all()

    def _run(self, watch: PathWatch) -> None:
        while not self._closing.wait(PATH_LOOK_S):
            try:
                if watch.look():
                    self._native.listen_at(self._socket.socket.fileno())
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                _log.error("the path where engines attach is not looked after any more", exc_info=error)
                return

    def drain(self) -> None:
        """Store nothing any more that engines publish."""
        self._native.drain()

    def finds(self, least_rate: float, most: int) -> list[tuple[int, list[tuple[bytes, float, int]]]]:
        """Return what engines say that their calls find, as :data:`p2pkv.cache.hot_readers.EngineFinds`."""
        return self._native.finds(least_rate, most)

    def close(self) -> None:
        """End every attachment; what engines ask for then they don't get. Idempotent."""
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._native.close()

    def readings(self) -> dict[str, float]:
        """Return what is counted, by the names of the metrics."""
        stats = self._native.stats()
        return {
            "p2pkv_attached_engines": stats["engines"],
            "p2pkv_attached_lines": stats["lines"],
            "p2pkv_attached_memory_bytes": stats["memory_bytes"],
            "p2pkv_attach_refused_total": stats["refused"],
            "p2pkv_attach_requests_total": stats["requests"],
            "p2pkv_attach_withdrawn_total": stats["withdrawn"],
            "p2pkv_attach_stored_pages_total": stats["stored_pages"],
            "p2pkv_attach_stored_bytes_total": stats["stored_bytes"],
            "p2pkv_attach_largest_share_bytes": stats["largest_charge"],
            "p2pkv_attach_share_evicted_pages_total": stats["taken_out"],
            "p2pkv_attach_share_refused_pages_total": stats["not_taken"],
        }
