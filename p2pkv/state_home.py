"""Where this user's state lies: the private secret, and disk tiers that were given no folder."""

from __future__ import annotations

import os
from pathlib import Path

from p2pkv.errors import ConfigError


def state_home(setting: str) -> Path:
    """Return ``$XDG_STATE_HOME/p2pkv``, by default below the home directory.

    Raises :class:`ConfigError` if this user has none; ``setting`` is what to set instead.
    """
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "p2pkv"
    try:
        return Path.home() / ".local" / "state" / "p2pkv"
    except RuntimeError as error:
        raise ConfigError(
            f"this user has no home directory (no HOME, and user id {os.getuid()} is in no passwd file); set "
            f"{setting}, or XDG_STATE_HOME"
        ) from error
