"""What an open project owes those who meet it: a licence that travels with it, and pages that say what is so."""

from __future__ import annotations

import hashlib
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""The SHA-256 of the licence's text as the Apache Software Foundation publishes it."""


def test_the_licence_is_apache_2_0_to_the_letter() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0


def test_what_is_installed_names_its_licence_and_brings_its_text() -> None:
    installed = distribution("p2pkv")
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert installed.metadata.get_all("License-File") == ["LICENSE"]
    text = installed.read_text("licenses/LICENSE")
    assert text is not None
    assert hashlib.sha256(text.encode()).hexdigest() == APACHE_2_0


def test_an_image_is_built_with_the_licence() -> None:
    # the build reads it, and .dockerignore leaves away whatever it does not name
    assert "!LICENSE" in (ROOT / ".dockerignore").read_text().splitlines()
