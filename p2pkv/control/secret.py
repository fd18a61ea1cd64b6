"""The cluster's secret, and the CURVE keys that follow from it.

Every node of a cluster derives one and the same key pair from the secret. A client has to know the server's public key
to speak CURVE at all, and the server admits that one client key only: whoever lacks the secret gets neither.

While a cluster is moved to another secret, its servers go by one secret or the other, each by one. Clients have both,
and find out by which one a server goes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85

from p2pkv.errors import ConfigError
from p2pkv.state_home import state_home

MIN_SECRET_BYTES = 16
_MIN_DIFFERENT_BYTES = 6
"""Sixteen random hexadecimal digits have fewer once in 30,000 times; a secret that somebody typed to get going,
such as a run of ones, often has."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKeys:
    """A CURVE key pair in Z85, as ZMQ takes it: by it servers go, and clients first."""

    public: bytes
    private: bytes
    accepted: tuple[ClusterKeys, ...] = ()
    """Those by which servers may go besides: of the secret of before, or of the next one."""

    @property
    def all(self) -> tuple[ClusterKeys, ...]:
        """Every pair by which a server may go."""
        return (self, *self.accepted)

    @property
    def public_raw(self) -> bytes:
        """The public key as 32 bytes, as ZAP delivers it."""
        return zmq.utils.z85.decode(self.public)


def cluster_keys(secret_file: str | None, accepted: Sequence[str] = ()) -> ClusterKeys:
    """Derive the cluster's keys from ``secret_file``, or from this user's private secret, made if there is none.

    ``accepted`` names the files of other secrets that are valid as well. Raises :class:`~p2pkv.errors.ConfigError` if a
    file can't be read, is readable by others, or is too short.
    """
    public, private = _pair_of(Path(secret_file) if secret_file is not None else _private_secret())
    others = dict(_pair_of(Path(name), "accepted_secret_files") for name in accepted)
    others.pop(public, None)  # a file may have been filled with the new secret already
    return ClusterKeys(public, private, tuple(ClusterKeys(*pair) for pair in others.items()))


def _pair_of(path: Path, setting: str = "secret_file") -> tuple[bytes, bytes]:
    """Return the public and the private key that follow from a file's secret."""
    raw = hashlib.blake2b(_read_secret(path, setting), digest_size=32, person=b"p2pkv-curve-1").digest()
    private = zmq.utils.z85.encode(raw)
    return zmq.curve_public(private), private


def _read_secret(path: Path, setting: str) -> bytes:
    try:
        # without O_NONBLOCK a FIFO is waited for until somebody writes to it
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{setting} {path} is no regular file; name one that holds the secret")
            secret = os.read(fd, 65536).strip()
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot read {setting} {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"{setting} {path} has mode {stat.S_IMODE(mode):04o}, so others can read it; chmod 600 it"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{setting} {path} holds {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed, "
            f"for example from: head -c 32 /dev/urandom | base64 > {path}"
        )
    if len(set(secret)) < _MIN_DIFFERENT_BYTES:
        raise ConfigError(
            f"{setting} {path} has only {len(set(secret))} different bytes and is soon guessed; take a random one, "
            f"for example from: head -c 32 /dev/urandom | base64 > {path}"
        )
    return secret


def private_secret_path() -> Path:
    """Return where this user's private secret lies, or will."""
    return state_home("secret_file") / "secret"


def _private_secret() -> Path:
    path = private_secret_path()
    if path.exists():
        return path
    fresh = path.with_name(f"secret.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(fresh, path)  # whole or not at all, and never over another process's
        except FileExistsError:
            return path
        finally:
            fresh.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot make a private secret at {path}: {error.strerror}; set secret_file"
        ) from error
    return path
