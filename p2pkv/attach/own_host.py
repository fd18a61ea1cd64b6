"""An engine's end of its attachment: it is made again whenever the host's node comes back.

An :class:`_native.Attachment` is one life of the node as this engine sees it. Calls take the one of their moment; where
there is none they have nothing to wait for, and miss at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from p2pkv import _native
from p2pkv.attach.auto import has_listener
from p2pkv.errors import ConfigError, ControlError
from p2pkv.limited_log import LimitedLog
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

APPEAR_S = 5.0
"""How long an engine that starts waits where nobody listens: a node that is being restarted is back in two seconds."""
_ANSWER_S = 5.0
"""How long a node that has let a connection in may take to answer."""
_RETRY_S = 0.1
"""How often an engine without its node looks whether it is back: so it is attached within a second."""
_HOLD_S = 300.0
"""How long an engine reads on in the memory of a node that is away. Its keeper may have given it up meanwhile; this is
a guess: an upgrade takes less, images that are fetched for it included."""
_SHARE_S = 30.0
"""For telling the node of one memory: mapping a large one takes a while."""


class SharedMemory:
    """Memory of this engine that its node may read where it is. ``fd`` is open until it is forgotten."""

    def __init__(self, address: int, nbytes: int, fd: int) -> None:
        self.address, self.nbytes, self.fd = address, nbytes, fd
        self.used_by: tuple[_native.Attachment, int] | None = None
        """The attachment that publishes from it, and its number there; guarded by the lock of :class:`OwnHost`."""


class OwnHost(Resource):
    """Thread-safe. A thread keeps the attachment, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        path: str,
        mark: int,
        on_attached: Callable[[_native.Attachment, int], None],
        on_lost: Callable[[int], None],
        *,
        cluster: str | None = None,
        open_attachment: Callable[..., _native.Attachment] = _native.Attachment.open,
    ) -> None:
        """Attach; ``on_attached`` is called by the thread whenever that was done anew, with the node's boot epoch.

        ``mark`` is what the node knows this engine by, life after life: its pages are then charged to the same share.
        ``on_lost`` is called by it when the node has gone, with the boot epoch of the life that has ended.
        ``cluster`` is what the node's cluster has to be called; None: whatever it is called, from now on.
        ``open_attachment`` stands in for :meth:`_native.Attachment.open` where there is no node.

        Raises :class:`~p2pkv.errors.ControlError` if no node lets this engine in, and
        :class:`~p2pkv.errors.ConfigError` if the node that does is of another cluster.
        """
        self.path = path
        self._mark = mark
        self.n_attached = 1
        self._gone_at = 0.0
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._log = LimitedLog(_log)
        # Guards what is shared, what of it an attachment uses, and the attachment's replacement.
        self._lock = threading.RLock()
        self._shared: set[SharedMemory] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.pool = _native.CurrentMappedPool()
        """The node's pool; it stays while the node is away if a keeper has its memory."""
        self.lost: tuple[_native.Attachment, int] | None = None
        """The node that has gone last, and the number of the bumps that it had heard of."""
        self._is_mapping_in = False
        self._open = open_attachment
        self._attachment: _native.Attachment | None = self._find()
        self.cluster: str = self._attachment.cluster
        """The name of the cluster whose pages this engine has, life after life of its node."""
        if cluster is not None and cluster != self.cluster:
            self._attachment.close()
            raise ConfigError(
                f"cluster is {cluster!r}, and the node at 'unix:{path}' is of cluster {self.cluster!r}: attach to a "
                f"node of {cluster!r}, or leave cluster out, since an engine goes by its node's"
            )
        self.pool.set(self._attachment.take_pool())

    def _find(self) -> _native.Attachment:
        """Attach for the first time: to who listens, or to who does so soon, as a node that is being restarted."""
        until = time.monotonic() + APPEAR_S
        while True:
            try:
                return self._open(self.path, _ANSWER_S, mark=self._mark)
            except RuntimeError as error:
                if time.monotonic() >= until or has_listener(Path(self.path)):
                    raise ControlError(f"cannot attach to the node at 'unix:{self.path}': {error}") from error
                self._log.warning(str(error), "not attached to the node at unix:%s yet: %s", self.path, error)
            time.sleep(_RETRY_S)

    @property
    def attachment(self) -> _native.Attachment | None:
        """The one of this moment; None while the host's node is away."""
        return self._attachment

    def start(self) -> None:
        """Attach again from now on, when the node has gone."""
        self._thread = threading.Thread(target=self._run, name="p2pkv-own-host", daemon=True)
        self._thread.start()

    def map_in(self) -> None:
        """Have a thread map the node's pool in ahead of its first use, and those of the node's successors."""
        self._is_mapping_in = True
        pool = self.pool.get()
        if pool is not None:
            pool.map_in()

    def share(self, memory: SharedMemory) -> None:
        """Have the node read ``memory`` where it is, now and whenever it comes back."""
        with self._lock:
            self._shared.add(memory)
            attachment = self._attachment
        if attachment is not None:
            self._tell(attachment, memory)

    def show(self, address: int, nbytes: int, fd: int) -> Callable[[], None]:
        """Do as :meth:`share`; return what has the node read it no more."""
        memory = SharedMemory(address, nbytes, fd)
        with ExitStack() as undo:
            # else the next node would be told of what its owner has closed
            undo.callback(self.forget, memory)
            self.share(memory)
            undo.pop_all()
        return partial(self.forget, memory)

    def forget(self, memory: SharedMemory) -> None:
        """Have the node read it no more. Doesn't wait, also where the node is being told of it."""
        with self._lock:
            self._shared.discard(memory)
            used_by, memory.used_by = memory.used_by, None
            if used_by is not None:
                attachment, number = used_by
                attachment.forget(number)

    def _tell(self, attachment: _native.Attachment, memory: SharedMemory) -> None:
        """Have the node map it, which may take a while, and publish from it if it is shared even then.

        Other memory may lie at its address when it has been forgotten meanwhile: the node would read the bytes of this
        one for that one's pages.
        """
        with self._lock:
            if memory not in self._shared:
                return
            try:
                fd = os.dup(memory.fd)  # its owner may close it as soon as it has been forgotten
            except OSError as error:
                self._warn(memory, f"its descriptor can't be passed on: {error}")
                return
        try:
            number, problem = attachment.share(memory.nbytes, fd, _SHARE_S)
        finally:
            os.close(fd)
        with self._lock:
            is_wanted = memory in self._shared and attachment is self._attachment
            if number and is_wanted:
                attachment.use(number, memory.address, memory.nbytes)
                memory.used_by = (attachment, number)
            elif number:
                attachment.forget(number)
        if problem and is_wanted and not attachment.has_gone():
            self._warn(memory, problem)

    def _warn(self, memory: SharedMemory, problem: str) -> None:
        self._log.warning(
            problem,
            "memory of %d bytes is copied twice when its pages are published: %s",
            memory.nbytes,
            problem,
        )

    def _run(self) -> None:
        while not self._closing.is_set():
            attachment = self._attachment
            try:
                if attachment is None:
                    self._attach_again()
                elif attachment.wait_gone(3600.0) and not self._closing.is_set():
                    self._lose(attachment)
            except RuntimeError as error:
                self._log.warning(str(error), "not attached to the node at unix:%s yet: %s", self.path, error)
                self._closing.wait(_RETRY_S)
            except Exception as error:  # noqa: BLE001  # the top of a thread's loop
                self._log.error(type(error).__name__, "not attached again; trying once more", exc_info=error)
                self._closing.wait(_RETRY_S)

    def _lose(self, attachment: _native.Attachment) -> None:
        _log.warning("the host's node at unix:%s has gone; it is looked for", self.path)
        self._attachment = None
        self._gone_at = time.monotonic()
        self.lost = (attachment, attachment.epochs_version)
        attachment.close()
        pool = self.pool.get()
        boot = 0 if pool is None else pool.boot
        if pool is not None and not pool.is_kept:
            self.pool.set(None)  # else this process would hold its memory while the next node makes its own
        self._on_lost(boot)

    def _let_go_of_pool(self) -> None:
        """Hold the memory of a node no longer that does not come back."""
        if self.pool.get() is not None and time.monotonic() - self._gone_at > _HOLD_S:
            _log.warning("the host's node at unix:%s does not come back: its pool is let go of", self.path)
            self.pool.set(None)

    def _attach_again(self) -> None:
        self._let_go_of_pool()
        attachment = self._open(self.path, _ANSWER_S, self.pool.get(), self._mark)
        if attachment.cluster != self.cluster:  # its pages may have the same keys and be other bytes
            attachment.close()
            raise RuntimeError(
                f"the node there is of cluster {attachment.cluster!r} now, and this engine's was {self.cluster!r}; "
                "give that node a path of its own, or start this engine again"
            )
        pool = attachment.take_pool()
        self._on_attached(attachment, pool.boot)  # who it is must be known before anything is stored there
        self.pool.set(pool)
        if self._is_mapping_in:
            self.map_in()
        with self._lock:
            shared = list(self._shared)
            self._attachment = attachment
        if self._closing.is_set():
            attachment.close()
            return
        for memory in shared:
            self._tell(attachment, memory)
        self.n_attached += 1
        _log.info("attached to the host's node at unix:%s again", self.path)

    def wait_attached(self, timeout: float) -> bool:
        """Wait until there is a node to ask."""
        deadline = time.monotonic() + timeout
        while self._attachment is None and time.monotonic() < deadline:
            self._closing.wait(_RETRY_S / 10)
        return self._attachment is not None

    def interrupt(self) -> None:
        """End calls under way, and attach no more."""
        self._closing.set()
        if (attachment := self._attachment) is not None:
            attachment.close()

    def close(self) -> None:
        """Let go of the node. Idempotent."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()
        self.pool.set(None)
