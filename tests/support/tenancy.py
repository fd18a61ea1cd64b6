"""Secrets and settings of nodes with tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Secrets:
    """Files of secrets, by the names of their holders; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> str:
        path = self._folder / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(f"the secret of {name} in this test")
        return str(path)


def settings(secret: Secrets, *tenants: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a small node of the cluster with these tenants."""
    own = {name: {"secret_file": secret(name), "pool_size": "1MiB"} for name in tenants}
    common = {"secret_file": secret("cluster"), "pool_size": "1MiB", "buffer_size": 0, "deadline": 5.0}
    return common | {"tenants": own} | more
