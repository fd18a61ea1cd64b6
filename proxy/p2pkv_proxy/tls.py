"""TLS: which engines are believed, and for clients a certificate and its key, another of which may take its place."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from p2pkv.errors import ConfigError

_MOST_BYTES = 4 << 20


def read_authorities(path: Path) -> str:
    """Return the certificates of a file of authorities, in PEM. Raises :class:`ConfigError`."""
    try:
        found = _read(path).decode()
        ssl.create_default_context(cadata=found)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot use the authorities in {path}: {error}; it must be certificates in PEM"
        ) from error
    return found


def believed(authorities: str | None) -> ssl.SSLContext | None:
    """Return whose certificates are believed of engines: these authorities'; None for the system's."""
    return ssl.create_default_context(cadata=authorities) if authorities is not None else None


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its chain, and its key, both in PEM. They belong together."""

    chain: bytes
    key: bytes = field(repr=False)

    @classmethod
    def read(cls, chain: Path, key: Path) -> Certificate:
        """Read both. Raises :class:`ConfigError`."""
        try:
            made = cls(_read(chain), _read(key))
            made.context()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the certificate {chain} with the key {key}: {error}; "
                "both must be PEM, the key without a password and the certificate's own"
            ) from error
        return made

    def context(self) -> ssl.SSLContext:
        """Return what a server needs. Raises :class:`OSError` and :class:`ValueError`, of what was not read before."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with _as_file(self.chain) as chain, _as_file(self.key) as key:
            # with a password to ask for OpenSSL would wait at the terminal
            context.load_cert_chain(chain, key, password="")
        return context


class ServedCertificate:
    """The certificate that clients get, as it is now: ``context`` is the server's for ever."""

    def __init__(self, certificate: Certificate) -> None:
        self.context = certificate.context()
        self.serve(certificate)
        # called for each handshake, of clients that name no host as well
        self.context.sni_callback = self._choose

    def serve(self, certificate: Certificate) -> None:
        """Have handshakes from now on use another one; connections go on with what they began with."""
        self.certificate = certificate
        self._present = certificate.context()

    def _choose(self, connection: ssl.SSLObject, host: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._present


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise ValueError(f"{path} has more than {_MOST_BYTES} bytes")
    return found


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Have OpenSSL read what is in memory alone: it takes nothing but files, and these may have changed meanwhile."""
    descriptor = os.memfd_create("p2pkv-pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
