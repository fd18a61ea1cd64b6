"""docs/quickstart.md goes as it says, but for the installation, which ``make test-wheel`` walks too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from quickstart import Walk

PAGE = Path(__file__).resolve().parents[2] / "docs/quickstart.md"


def test_the_quickstart_goes_as_it_says(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    walk = Walk(PAGE, tmp_path, {"PATH": path})
    try:
        walk.go()
    finally:
        walk.close()
