"""What the tests of several real engines need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from demo.xpyd.real_engines import SGLang


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the same name and shape that answers differently."""
    folder = tmp_path_factory.mktemp("other") / "tiny-model"
    make = Path(__file__).parents[2] / "tools" / "engines" / "make_model.py"
    subprocess.run([SGLang.VENV / "bin" / "python", make, folder, "999"], check=True, timeout=300)
    return folder
