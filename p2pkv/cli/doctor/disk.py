"""The disk tier: where it lies, whether it has the room it may take, and how bytes get there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from p2pkv.cli.doctor.finding import Finding, Verdict, size
from p2pkv.config import Config
from p2pkv.disk.store import DiskOptions, DiskStore, UnusableDiskError, refusal
from p2pkv.disk.tier import disk_folder
from p2pkv.errors import ConfigError

_TRIAL_NBYTES = 8 << 20
"""Capacity of the store that is tried out; it takes a fraction of it, and only for a moment."""


def examine_disk(config: Config, name: str = "disk tier") -> Finding:
    """Say whether a node would take its folder, and try out a small store there; the folder itself is left alone."""
    if not config.disk_nbytes:
        return Finding(Verdict.GOOD, name, "off; disk_size turns it on")
    path = Path(disk_folder(config)).absolute()
    what = f"{path}, layout {config.disk_layout}, {size(config.disk_nbytes)}"
    refused = refusal(
        str(path),
        layout=config.disk_layout,
        node_id=config.node_id,
        namespace=config.namespace,
        cluster=config.cluster,
    )
    if refused is not None:
        # without its disk a node works, but not with one that is somebody else's, or open to others
        verdict = Verdict.NOTE if isinstance(refused, UnusableDiskError) else Verdict.BAD
        return Finding(verdict, name, f"{what}: {refused}", "mend it, or choose another disk_path")
    if config.disk_path and not path.parent.is_dir():
        says = f"{what}: cannot make it: {path.parent} is no folder"
        return Finding(Verdict.NOTE, name, says, "make that, or choose another disk_path")
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        how = _try_out(there, config)
        free = shutil.disk_usage(there).free
    except (ConfigError, OSError) as error:
        return Finding(Verdict.NOTE, name, f"{what}: {error}", "mend it, or choose another disk_path")
    says = f"{what}; {size(free)} free; {how}"
    missing = config.disk_nbytes - free - _used(path)
    if missing > 0:
        advice = f"free {size(missing)}, or lower disk_size: a full disk suspends the tier"
        return Finding(Verdict.NOTE, name, says, advice)
    return Finding(Verdict.GOOD, name, says)


def _try_out(folder: Path, config: Config) -> str:
    """Say how a store in ``folder`` reads and writes; raises ConfigError or OSError where none can be."""
    options = DiskOptions(
        capacity=_TRIAL_NBYTES, layout=config.disk_layout, compression=config.disk_compression
    )
    with tempfile.TemporaryDirectory(prefix=".p2pkv-doctor-", dir=folder) as trial:
        store = DiskStore(trial, options, node_id="doctor", namespace="doctor")
        how = store.io, "O_DIRECT" if store.is_direct else "through the page cache: no O_DIRECT here"
        if not store.close():
            raise OSError("the disk hangs")
    return ", ".join((*how, f"compression {config.disk_compression}"))


def _used(path: Path) -> int:
    """Bytes that the tier's folder occupies already."""
    used = 0
    for entry in path.rglob("*"):
        try:
            used += entry.lstat().st_blocks * 512
        except FileNotFoundError:  # its node runs, and deleted it meanwhile
            continue
    return used
