"""What lets this node into its cluster, and the others to it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from p2pkv.address import is_loopback, split_address
from p2pkv.cli.doctor.finding import Finding, Verdict
from p2pkv.config import Config
from p2pkv.control.secret import MIN_SECRET_BYTES, cluster_keys, private_secret_path
from p2pkv.errors import ConfigError


def examine_cluster(config: Config) -> Iterator[Finding]:
    """Look at the secret and the address."""
    yield Finding(Verdict.GOOD, "cluster", f"{config.cluster!r}; nodes of another name are refused")
    yield _secret(config)
    yield _listen(config)


def _secret(config: Config) -> Finding:
    if config.secret_file is None:
        path = private_secret_path()
        if not path.exists():
            return Finding(
                Verdict.GOOD,
                "secret",
                f"none is set; a private one will be made at {path}, for this user's nodes here",
            )
    else:
        path = Path(config.secret_file)
    try:
        cluster_keys(str(path))
    except ConfigError as error:
        return Finding(Verdict.BAD, "secret", str(error), _secret_advice(path))
    kind = (
        "private secret, for this user's nodes on this machine"
        if config.secret_file is None
        else "secret_file"
    )
    return Finding(Verdict.GOOD, "secret", f"{path} ({kind})")


def _secret_advice(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return f"make it: (umask 077; head -c 32 /dev/urandom | base64 > {path}), the same on every node"
    return f"chmod 600 {path}" if mode & 0o077 else f"put at least {MIN_SECRET_BYTES} random bytes into it"


def _listen(config: Config) -> Finding:
    host, port = split_address("listen", config.listen)
    where = f"{config.listen}{' (any free port)' if port == 0 else ''}"
    if is_loopback(host):
        advice = (
            ""
            if config.secret_file is None
            else "other machines can't reach it: set listen to a network address"
        )
        return Finding(
            Verdict.NOTE if advice else Verdict.GOOD, "listen", f"{where}: this machine only", advice
        )
    return Finding(
        Verdict.GOOD, "listen", f"{where}: reachable from other machines, for those with the secret"
    )
