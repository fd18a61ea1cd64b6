"""Certificates for servers on 127.0.0.1, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl is there to make certificates"
)


class Authority:
    """Makes certificates in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.ca = folder / f"{name}-ca.pem"
        self._key = folder / f"{name}-ca.key"
        subject = ["-subj", f"/CN={name}"]
        self._openssl("req", "-x509", "-keyout", self._key, "-out", self.ca, "-days", "2", *subject)

    def issue(
        self, name: str, usage: str = "serverAuth,clientAuth", *, host: str = "IP:127.0.0.1", days: int = 2
    ) -> tuple[Path, Path]:
        """Return a certificate for ``host``, and its key. With -1 day it has expired."""
        cert, key, request = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        names = self._folder / "names"
        names.write_text(f"subjectAltName={host}\nextendedKeyUsage={usage}\n")
        self._openssl("req", "-keyout", key, "-out", request, "-subj", "/O=p2pkv")
        signer = ["-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", str(days)]
        subprocess.run(
            ["openssl", "x509", "-req", "-in", request, "-out", cert, *signer, "-extfile", names],
            check=True,
            capture_output=True,
        )
        return cert, key

    @staticmethod
    def _openssl(command: str, *arguments: object) -> None:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run(["openssl", command, *key, *map(str, arguments)], check=True, capture_output=True)
