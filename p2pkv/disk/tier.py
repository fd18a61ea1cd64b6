"""The disk tier of a node: what the pool evicts stays fetchable, here and by peers, and survives a restart.

Pages that were published are written behind the publisher's back (``write_through``) or shortly before the pool
evicts them (``on_evict``). This node reads its own from disk straight into the caller's memory; for a peer they are
promoted, that is brought back into the pool, where the peer reads them as any other page. Nothing here makes a call
wait longer than it may: a disk that is slow, full, broken or gone leaves a node that works from memory, one warning
and ``p2pkv_disk_suspended``; when the disk works again so does the tier.

The per-page work is native (``native/src/disk/{tier,promotions}.cc``). ``docs/disk.md`` has the flow.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.config import DISK_ADMISSION, DISK_WRITE, Config
from p2pkv.disk.store import (
    DEFAULT_CLUSTER,
    DiskInUseError,
    DiskOptions,
    DiskStore,
    UnusableDiskError,
)
from p2pkv.errors import ConfigError
from p2pkv.page import LOCATION, Keys, Locations, as_locations
from p2pkv.pool import Pool
from p2pkv.state_home import state_home

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often the disk's health is looked at, for the one warning."""
_START_S = 2.0
"""A start waits so long for the folder; after that the node works from memory until the disk answers."""
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
"""Between attempts to open a folder that could not be used; doubled from the first to the second."""
_RECOVERED = 4096
"""Pages of an earlier run that are told to the directory together."""
_QUEUE = 64 << 20
_WARM_RATE = 256 << 20
"""Bytes a second loaded for nobody who waits: a quarter of what a fast disk gives. A guess; not tuned."""
_CLOSE_S = 5.0
_ENDED_S = 5.0
"""How long who goes on with the pool of a process that has ended waits until the folder is free as well: a process lets
go of its files one after the other."""
_IN_USE_S = 0.01
_LEFT_BATCH = 1024
_MOST_LEFT_BEHIND = 1 << 16
"""Pages of an earlier life that wait for the disk at once: a quarter of all that may."""


def default_disk_path(node_id: str, namespace: str, cluster: str = DEFAULT_CLUSTER) -> Path:
    """Return the folder that this node and namespace have when none is configured: the same at each start.

    The secret is not in its name: a node whose secret was changed for another finds its pages.
    """
    whose, person = f"{len(node_id)}:{node_id}{namespace}", b""
    if (
        cluster != DEFAULT_CLUSTER
    ):  # a cluster that nobody named has the folders that it had before this counted
        whose, person = f"{len(cluster)}:{cluster}{whose}", b"p2pkv-cluster-1"
    digest = hashlib.blake2b(whose.encode(), digest_size=8, person=person).hexdigest()
    readable = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in node_id)
    return state_home("disk_path") / "disk" / f"{readable[:64]}-{digest}"


def disk_folder(config: Config) -> str:
    """Return the folder of a node's pages; a suffix makes a name beside it."""
    return config.disk_path or str(default_disk_path(config.node_id, config.namespace, config.cluster))


class DiskTier:
    """Thread-safe. Runs from construction to :meth:`close`; close it before the pool.

    Raises :class:`~p2pkv.errors.ConfigError` for a folder that is in use, or another node's; a disk that can't be
    written to now is tried again in the background.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        *,
        own_key: int,
        boot: int,
        faults: _native.FaultyFiles | None = None,
        changes: _native.ChangeLog | None = None,
        guests: _native.Guests | None = None,
        has_adopted: bool = False,
    ) -> None:
        """``has_adopted``: the pool is gone on with. What lies there is written where the disk does not have it."""
        self._config = config
        self._pool = pool
        self._own_key = own_key
        self._boot = boot
        self._faults = faults
        self._changes = changes
        self.path = disk_folder(config)
        self.native = _native.Tier(
            pool.native,
            owner=own_key,
            boot=boot,
            write=DISK_WRITE.index(config.disk_write),
            admission=DISK_ADMISSION.index(config.disk_admission),
            queue_size=_QUEUE,
            warm_rate=_WARM_RATE,
            guests=guests,
        )
        self._has_adopted = has_adopted
        is_written = has_adopted and config.disk_admission == "all"
        self._left_from: int | None = 0 if is_written else None
        """From where on pages that an earlier life has left are to be written; None: all have been seen to."""
        self._closing = threading.Event()
        self._attaching = threading.Lock()  # held while a store is taken, so that none appears after `close`
        self._store: DiskStore | None = None
        self._n_failed_opens = 0
        self._lock = threading.Lock()  # guards `_unsure`
        self._unsure: list[Keys] = []
        self._tried = threading.Event()  # the folder was opened, or could not be: `_refusal` says why
        self._refusal: ConfigError | None = None  # this and the next are guarded by `_attaching`
        self._has_started = False
        self._thread = threading.Thread(target=self._run, name="p2pkv-disk", daemon=True)
        self._thread.start()
        has_answered = self._tried.wait(_START_S)
        if (refusal := self._finish_start()) is not None:
            self.close()
            raise refusal
        if not has_answered:
            _log.warning(
                "node %s works without its disk until that answers: %s was not opened within %s s",
                config.node_id,
                self.path,
                _START_S,
            )

    def _finish_start(self) -> ConfigError | None:
        with self._attaching:
            self._has_started = True
            return self._refusal

    def _run(self) -> None:
        """Open the folder, then look after it: the disk may hang in either, and holds up nobody else."""
        try:
            self._open()
        except UnusableDiskError as error:
            self._n_failed_opens = 1
            _log.warning(
                "node %s works without its disk until that can be used: %s", self._config.node_id, error
            )
        except ConfigError as error:
            with self._attaching:
                self._refusal = error
                is_late = self._has_started
            if is_late:
                _log.error("node %s stays without its disk: %s", self._config.node_id, error)
            return
        finally:
            self._tried.set()
        self._look_after()

    def _open(self) -> None:
        config = self._config
        if config.disk_path is None:
            _make_private(Path(self.path).parent)
            self._tell_of_former()
        options = DiskOptions(
            capacity=config.disk_nbytes,
            layout=config.disk_layout,
            fsync=config.disk_fsync,
            compression=config.disk_compression,
            queue_size=min(_QUEUE, (self._pool.nbytes - self._pool.data_offset) // 4),
        )
        store = self._open_store(options)
        with self._attaching:
            # Also of a node that has gone meanwhile: what it took back must not be found by the next run.
            self.native.attach(self._pool.native, store.native)
            if not self._closing.is_set():
                self._store = store
                return
        store.close(_CLOSE_S)

    def _open_store(self, options: DiskOptions) -> DiskStore:
        config, until = self._config, time.monotonic() + _ENDED_S
        while True:
            try:
                return DiskStore(
                    self.path,
                    options,
                    node_id=config.node_id,
                    namespace=config.namespace,
                    cluster=config.cluster,
                    faults=self._faults,
                    changes=self._changes,
                )
            except DiskInUseError:
                if not self._has_adopted or time.monotonic() >= until or self._closing.wait(_IN_USE_S):
                    raise

    def _tell_of_former(self) -> None:
        """Say at the first start that pages of before may lie in a folder that names no cluster, and are not taken."""
        config = self._config
        former = default_disk_path(config.node_id, config.namespace)
        if str(former) == self.path or Path(self.path).exists() or not (former / "store").exists():
            return
        _log.warning(
            "node %s of cluster %s begins with an empty disk, %s: the pages in %s count as those of cluster %s. If "
            "they are this node's, from a p2pkv whose folders did not name their cluster, delete that folder",
            config.node_id,
            config.cluster,
            self.path,
            former,
            DEFAULT_CLUSTER,
        )

    def _look_after(self) -> None:
        pause = _RETRY_S
        while not self._closing.wait(_LOOK_S if self._store is not None else pause):
            if self._store is not None:
                self._store.check_health()
                self._write_left(self._store)
                continue
            try:
                self._open()
            except UnusableDiskError:
                self._n_failed_opens += 1
                pause = min(2 * pause, _LONGEST_RETRY_S)
            except Exception:  # noqa: BLE001  # the top of a thread's loop
                _log.exception("node %s stays without its disk", self._config.node_id)
                return
            else:
                _log.info("node %s has its disk now", self._config.node_id)

    def _write_left(self, store: DiskStore) -> None:
        """Offer the disk pages that an earlier life has left in the pool, as if they were published now.

        Not before it is known what the disk has, and not all at once. Where a second use is what admits pages, one that
        comes now is the first that is known of them.
        """
        while self._left_from is not None and store.is_recovered and not self._closing.is_set():
            if self.native.stats()["behind_pages"] >= _MOST_LEFT_BEHIND:
                return
            keys, _, cursor = self._pool.list(self._left_from, _LEFT_BATCH)
            self.native.note_published(keys)
            self._left_from = cursor or None

    def note_published(self, keys: Keys) -> None:
        """Have pages of the pool written that were just published, as the policies say. Never waits."""
        self.native.note_published(keys)

    def note_fetched(self, keys: Keys) -> None:
        """The same of pages that were asked for here, which may be the second use that admits them."""
        self.native.note_fetched(keys)

    def set_boot(self, boot: int) -> None:
        """Have locations name this boot of the owner from now on, the pool's as well."""
        self._boot = boot
        self.native.set_boot(boot)

    def contains(self, keys: Keys) -> NDArray[np.uint8]:
        """Say which pages could be read from disk now; nothing is read."""
        return self.native.contains(keys)

    def locate(self, keys: Keys) -> tuple[NDArray[np.uint8], Locations]:
        """Say where pages are now: in the pool, else on disk, which is a location that is not resident."""
        found, locations = self.native.locate(keys)
        return found, as_locations(locations)

    def on_disk(self, n: int) -> Locations:
        """Return ``n`` locations as the directory knows pages on this disk, but for length and checksum."""
        locations = np.zeros(n, LOCATION)
        locations["owner"], locations["boot"] = self._own_key, self._boot
        return locations

    def list(self, cursor: int, limit: int) -> tuple[Keys, int]:
        """List at most ``limit`` keys on disk from ``cursor`` on (0: all), and the next cursor (0: that was all)."""
        if self._store is None:
            return np.zeros((0, 16), np.uint8), 0
        return self._store.list(cursor, limit)

    def recheck(self, keys: Keys) -> None:
        """Have the directory told again where these pages are: what it was told may have been too late."""
        with self._lock:
            self._unsure.append(keys)
        self._pool.wake_drainer()

    def drain_changed(self, limit: int) -> Keys:
        """Take keys of pages that were promoted, went from the disk, were found on it or asked for in vain.

        Does not wait; the pool's drainer is woken when there are some.

        Where they are now is asked of :meth:`locate`; whoever tells the directory does so in one thread, so that
        what it says last is what it saw last.
        """
        with self._lock:
            unsure, self._unsure = self._unsure, []
        changed = [*unsure, self.native.drain_changed(limit)]
        if self._store is not None:
            changed.append(self._store.drain_dropped(limit, 0))
            changed.append(self._store.drain_recovered(_RECOVERED, 0)[0])
        return np.concatenate(changed)

    def forget(self, keys: Keys) -> tuple[NDArray[np.uint8], Locations]:
        """Take pages back; return which were on disk, and as what the directory may know them."""
        on_disk = self.native.contains(keys)
        self.native.forget(keys)
        return on_disk, self.on_disk(len(keys))

    def clear(self) -> None:
        """Take all pages back; their bytes are deleted soon."""
        self.native.clear()

    def wait_cleared(self, timeout: float) -> bool:
        """Wait until what was taken back is written, so that no later run finds it, however this one ends.

        A disk that is not open is not waited for.
        """
        return self._store is None or self.native.wait_cleared(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until what was taken is written; False if it was not by then, or there is no disk."""
        return self._store is not None and self._store.flush(timeout)

    def readings(self) -> dict[str, float]:
        """Return what the metrics show, by name."""
        tier = self.native.stats()
        store = self._store.stats() if self._store is not None else {}
        is_troubled = self._store is None or self._store.check_health() != ""
        names = {
            "p2pkv_disk_capacity_bytes": "capacity",
            "p2pkv_disk_used_bytes": "used",
            "p2pkv_disk_pages": "pages",
            "p2pkv_disk_queued_bytes": "queued_bytes",
            "p2pkv_disk_stored_pages_total": "stored_pages",
            "p2pkv_disk_stored_bytes_total": "stored_bytes",
            "p2pkv_disk_written_bytes_total": "written_bytes",
            "p2pkv_disk_known_pages_total": "known_pages",
            "p2pkv_disk_refused_pages_total": "refused_pages",
            "p2pkv_disk_changed_pages_total": "changed_pages",
            "p2pkv_disk_lost_pages_total": "lost_pages",
            "p2pkv_disk_evicted_pages_total": "evicted_pages",
            "p2pkv_disk_read_pages_total": "hit_pages",
            "p2pkv_disk_read_bytes_total": "hit_bytes",
            "p2pkv_disk_bad_records_total": "bad_records",
            "p2pkv_disk_timed_out_pages_total": "timed_out_pages",
            "p2pkv_disk_recovered_pages_total": "recovered_pages",
            "p2pkv_disk_suspensions_total": "suspensions",
        }
        return {
            **{name: store.get(key, 0) for name, key in names.items()},
            "p2pkv_disk_suspended": float(is_troubled),
            "p2pkv_disk_failed_opens_total": self._n_failed_opens,
            "p2pkv_disk_skipped_pages_total": tier["skipped_pages"],
            "p2pkv_disk_caught_up_pages_total": tier["caught_up_pages"],
            "p2pkv_disk_behind_pages": tier["behind_pages"],
            "p2pkv_promoted_pages_total": tier["promoted_pages"],
            "p2pkv_promoted_bytes_total": tier["promoted_bytes"],
            "p2pkv_unpromoted_pages_total": tier["failed_pages"] + tier["refused_pages"],
            "p2pkv_late_promotions_total": tier["late_pages"],
            "p2pkv_unwarmed_pages_total": tier["unwarmed_pages"],
        }

    def close(self) -> None:
        """Answer who waits, write what is queued, seal the store. Idempotent; takes seconds if the disk hangs."""
        with self._attaching:
            self._closing.set()
            store = self._store
        self.native.close()
        # a folder that is just being opened lets go of itself, whenever the disk answers
        self._thread.join(_CLOSE_S)
        is_over = not self._thread.is_alive()
        if store is not None:
            is_over = store.close(_CLOSE_S) and is_over
        if not is_over:
            _log.warning(
                "node %s: the disk hangs; its folder %s stays locked", self._config.node_id, self.path
            )


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UnusableDiskError(f"cannot make {folder}: {error.strerror}; set disk_path") from error
