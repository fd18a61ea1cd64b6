"""What lets this node into its cluster, and the others to it."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from p2pkv.cli.doctor.addresses import examine_addresses, held_place
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.cli.doctor.join import examine_join
from p2pkv.cli.doctor.store import examine_store
from p2pkv.config import Config
from p2pkv.control.secret import MIN_SECRET_BYTES, ClusterKeys, cluster_keys, private_secret_path
from p2pkv.errors import ConfigError


def examine_cluster(config: Config) -> Iterator[Finding]:
    """Look at the secret and the addresses."""
    yield Finding(Verdict.GOOD, "cluster", f"{config.cluster!r}; nodes of another name are refused")
    secret, keys = _secret(config)
    yield secret
    held = held_place(config, keys, config.outward_addresses)
    yield from examine_addresses(config, held)
    if secret.verdict is not Verdict.BAD:
        if config.store is None or config.join_addresses:
            yield from examine_join(config, keys, held)
        if config.store is not None:
            yield from examine_store(config, config.store, keys)


def _secret(config: Config) -> tuple[Finding, ClusterKeys | None]:
    """Look at the secret without making one, and read the keys."""
    kind = "secret_file"
    if config.secret_file is not None:
        path = Path(config.secret_file)
    else:
        kind = "private secret, for this user's nodes on this machine"
        try:
            path = private_secret_path()
            if not path.exists():
                _try_to_write_below(path.parent)
                says = f"none is set; a private one will be made at {path}, for this user's nodes here"
                return Finding(Verdict.GOOD, "secret", says), None
        except ConfigError as error:
            return Finding(Verdict.BAD, "secret", str(error), "set secret_file"), None
        except OSError as error:
            says = f"none is set, and a private one can't be made at {path}: {error.strerror}"
            return Finding(Verdict.BAD, "secret", says, "set secret_file, or XDG_STATE_HOME"), None
    try:
        cluster_keys(str(path))
    except ConfigError as error:
        return Finding(Verdict.BAD, "secret", str(error), _secret_advice(path)), None
    try:
        keys = cluster_keys(str(path), config.accepted_secret_files)
    except ConfigError as error:
        advice = "have accepted_secret_files name secrets that are valid as well, or leave it out"
        return Finding(Verdict.BAD, "secret", str(error), advice), None
    besides = f"; accepted besides: {', '.join(config.accepted_secret_files)}" if keys.accepted else ""
    return Finding(Verdict.GOOD, "secret", f"{path} ({kind}){besides}"), keys


def _try_to_write_below(folder: Path) -> None:
    """Raise OSError if nothing can be made where ``folder`` is, or will be; leaves nothing there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with tempfile.TemporaryDirectory(prefix=".p2pkv-doctor-", dir=there):
        pass


def _secret_advice(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return f"make it: (umask 077; head -c 32 /dev/urandom | base64 > {path}), the same on every node"
    return f"chmod 600 {path}" if mode & 0o077 else f"put at least {MIN_SECRET_BYTES} random bytes into it"
