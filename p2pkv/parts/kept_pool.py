"""The pool of a node: new, or gone on with where a process of before has left it.

With a keeper the pool's memory outlives this process, however it ends. A successor goes on with it when the kernel says
that its predecessor can write no more; where anything of it is not as it has to be, it starts with an empty pool. The
pages are the node's from then on, where they were. What other nodes know of their places counts on, and they are
announced besides as after a loss.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack

from p2pkv import _native
from p2pkv.config import HUGE_PAGES, Config
from p2pkv.directory.membership.base import KeptBoots
from p2pkv.directory.view import DEFAULT_CLUSTER
from p2pkv.errors import ConfigError
from p2pkv.keeper.memory import Keeper, PoolMemory
from p2pkv.keeper.process import ProcessKeeper
from p2pkv.keeper.systemd import SystemdKeeper
from p2pkv.pool import Pool

_log = logging.getLogger(__name__)

GRANULE = 4096
"""What the pool's blocks are multiples of: a page of memory."""
_ENDED_S = 30.0
"""How long a start waits for a predecessor to end, beside the time that its memory takes."""
_ENDED_S_A_GIB = 0.5
"""The kernel tears the memory of a killed process down in a tenth of a second a GiB, and a busy one takes longer."""


class KeptPool:
    """Makes the pool of a node, and leaves it to the next one. Raises :class:`ConfigError` where that can't be done."""

    def __init__(self, config: Config, own_key: int, undo: ExitStack) -> None:
        self._config = config
        self._own_key = own_key
        setting = config.keeper if config.pool_nbytes else ""  # else it is there for tenants' pools
        self._keeper = _keeper_of(setting, kept_name(config.cluster, own_key))
        self._left: PoolMemory | None = None
        self._leaving: Pool | None = None
        self.n_adopted = 0
        """Pages that a predecessor has left."""
        self.has_adopted = False
        """Whether the memory is a predecessor's, whatever lies there."""
        if self._keeper is not None:
            undo.callback(self._keeper.close)
            undo.callback(self._leave)
            self._left = self._keeper.take()

    @property
    def left_nbytes(self) -> int:
        """Bytes that are occupied already by what was left."""
        return 0 if self._left is None else self._left.nbytes

    @property
    def is_kept(self) -> bool:
        """Whether somebody keeps the memory when this process ends."""
        return self._keeper is not None

    def make(self, changes: _native.ChangeLog) -> Pool:
        """Go on with what was left, or make a new one and have it kept."""
        pool = None
        if self._left is not None:
            pool = self._adopt(self._left, changes)
            self._let_go()
        if pool is not None:
            return pool
        pool = self._pool(changes, is_kept=self.is_kept)
        if self._keeper is not None:
            # before anything is published, so that it is either lost whole or kept whole
            self._keeper.keep(PoolMemory(pool.fd, pool.native.records_fd))
        return pool

    def boots(self, pool: Pool) -> KeptBoots | None:
        """Return in which boots before this one the pool was the same memory; None if it ends with this process."""
        return KeptBoots(*pool.native.first_boots()) if self.is_kept else None

    def _adopt(self, left: PoolMemory, changes: _native.ChangeLog) -> Pool | None:
        try:
            lock = _native.WriterLock.take(left.records, _ENDED_S + _ENDED_S_A_GIB * left.nbytes / 2**30)
        except OSError as error:
            raise ConfigError(
                f"the pool of node {self._config.node_id} is kept for its successor, but {error}: end the process that "
                "runs under this node_id, or choose another one"
            ) from error
        try:
            pool = self._pool(changes, is_kept=True, left=left, lock=lock)
        except ConfigError as error:
            lock.release()
            _log.warning("the pool that was left is not gone on with, and this one starts empty: %s", error)
            assert self._keeper is not None
            # Before another is made: engines of this host may have it mapped for minutes.
            still_there = _native.give_back_kept(left.region, left.records)
            if still_there:
                _log.warning("its memory goes when nobody maps it any more: %s", still_there)
            self._let_go()
            self._keeper.drop()
            return None
        self.has_adopted, self.n_adopted = True, pool.stats()["pages"]
        _log.info("goes on with %d pages that a process of before has left", self.n_adopted)
        return pool

    def _pool(
        self,
        changes: _native.ChangeLog,
        *,
        is_kept: bool,
        left: PoolMemory | None = None,
        lock: _native.WriterLock | None = None,
    ) -> Pool:
        config = self._config
        # nothing names this boot until `serve` knows the right one
        return Pool(
            -(-config.pool_nbytes // GRANULE) * GRANULE,
            granule=GRANULE,
            owner=self._own_key,
            boot=0,
            has_disk=bool(config.disk_nbytes),
            huge_page=HUGE_PAGES[config.huge_pages],
            prefault_behind=config.prefault == "behind",
            compression=config.compression,
            changes=changes,
            is_kept=is_kept,
            is_shown=bool(config.attach_listen_path),
            left=left,
            lock=lock,
        )

    def end(self, pool: Pool, *, is_left: bool) -> None:
        """Give the memory back, or leave it to a successor, when nothing of this node answers any more.

        A bump that it has said it has heard of has to be known to the successor.
        """
        if self._keeper is None:
            pool.release_memory()
        elif is_left:
            self._leaving = pool
        else:
            pool.release_memory()
            try:
                self._keeper.drop()
            except ConfigError as error:  # what it may have of this node has no page in it any more
                _log.warning("%s; end it if it does not come back, for it may hold the pool's memory", error)

    def _leave(self) -> None:
        self._let_go()
        if self._leaving is not None:
            self._leaving.leave_memory()

    def _let_go(self) -> None:
        if self._left is not None:
            self._left.close()
            self._left = None

    def readings(self) -> dict[str, float]:
        """Return what is counted, by the names of the metrics."""
        is_kept = self._keeper is not None and self._keeper.is_keeping
        return {"p2pkv_pool_is_kept": float(is_kept), "p2pkv_pool_adopted_pages": float(self.n_adopted)}


def kept_name(cluster: str, own_key: int) -> str:
    """Return by what name a keeper knows a node's pool.

    A node of the same id of another cluster, or of a tenant, has other pages under the same keys. The secret is not in
    it: a cluster that is moved to another one keeps its pages. Nodes of the default cluster have the name of before
    there were others.
    """
    name = f"{own_key:016x}"
    if cluster == DEFAULT_CLUSTER:
        return name
    of_cluster = hashlib.blake2b(cluster.encode(), digest_size=8, person=b"p2pkv-keeper-1")
    return f"{of_cluster.hexdigest()}-{name}"


def _keeper_of(setting: str, name: str) -> Keeper | None:
    if not setting:
        return None
    return SystemdKeeper(name) if setting == "systemd" else ProcessKeeper(setting.removeprefix("unix:"), name)
