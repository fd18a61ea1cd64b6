"""TLS: which engines are believed, and for clients a certificate and its key, which are read again when they change.

A pair that can't be read, or does not belong together, changes nothing: connections go on with the one before.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from p2pkv.errors import ConfigError
from p2pkv_proxy.listing import file_stamp

_log = logging.getLogger(__name__)
_LOOK_S = 1.0


def believed(authorities: Path | None) -> ssl.SSLContext | None:
    """Return whose certificates are believed of engines: those of a file's authorities; None for the system's.

    Raises :class:`ConfigError`.
    """
    if authorities is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(authorities))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot use the authorities in {authorities}: {error}; it must be certificates in PEM"
        ) from error


@dataclass(frozen=True, slots=True)
class Certificate:
    """Where a certificate with its chain lies, and its key, both in PEM."""

    chain: Path
    key: Path

    @classmethod
    def of(cls, chain: Path | None, key: Path | None) -> Certificate | None:
        """Return what two options name, None if neither does. Raises :class:`ConfigError`."""
        if chain is None and key is None:
            return None
        if chain is None or key is None:
            raise ConfigError("--tls-cert and --tls-key go together: one of them is missing")
        made = cls(chain, key)
        made.context()
        return made

    def context(self) -> ssl.SSLContext:
        """Return what a server needs. Raises :class:`ConfigError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have connections from now on use it. Raises :class:`ConfigError`; then ``context`` may be of no use."""
        try:
            # with a password to ask for OpenSSL would wait at the terminal
            context.load_cert_chain(self.chain, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the certificate {self.chain} with the key {self.key}: {error}; "
                "both must be PEM, the key without a password and the certificate's own"
            ) from error

    @property
    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Something that is different when one of the files has changed."""
        return file_stamp(self.chain), file_stamp(self.key)


class ServedCertificate:
    """The certificate that clients get, as it is now."""

    def __init__(self, certificate: Certificate) -> None:
        """Raises :class:`ConfigError`."""
        self._certificate = certificate
        self._stamp = certificate.stamp
        self.context = certificate.context()

    async def follow(self) -> None:
        """Take the files again whenever they change, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the files again if they have changed."""
        stamp = self._certificate.stamp
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._certificate.context()  # one of its own: what fails half way would leave the served one without a key
            self._certificate.load_into(self.context)
        except ConfigError as error:
            _log.warning("%s; clients get the one before", error)
        else:
            _log.info("the certificate %s was read again", self._certificate.chain)
