"""A headless browser that looks at a page of ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "chromium is not installed (Debian: chromium)"


def browse(url: str, folder: Path, size: str = "1280,1600") -> tuple[str, str]:
    """Return the document after some seconds of the page's own time, and what the console said."""
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", f"--window-size={size}"),
        *("--enable-logging=stderr", "--virtual-time-budget=9000", "--dump-dom"),
    ]
    done = subprocess.run(
        [str(CHROMIUM), *options, url], capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
