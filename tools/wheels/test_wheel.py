"""``make test-wheel``: installs the wheels of dist/ where nothing else is, and uses them there.

An environment in a temporary folder first has p2pkv's wheel and what that asks for, then the extras and the benchmark
as well. ``check_installed.py`` is run by its Python each time. Then docs/quickstart.md is walked from its first line
on, in a folder that has nothing but the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).with_name("check_installed.py")
WALK = ROOT / "tests/support/quickstart.py"


def main() -> None:
    dist = ROOT / "dist"
    wheels, benches = sorted(dist.glob("p2pkv-*.whl")), sorted(dist.glob("p2pkv_bench-*.whl"))
    if len(wheels) != 1 or len(benches) != 1:
        sys.exit(
            f"{dist} has {len(wheels)} wheels of p2pkv and {len(benches)} of p2pkv-bench, not one of each: `make wheel`"
        )
    with tempfile.TemporaryDirectory(prefix="p2pkv-wheel-") as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        python = home / "venv/bin/python"
        # nothing of the checkout, of the user or of this process's environment
        env = {"PATH": f"{python.parent}:{os.defpath}", "HOME": folder, "LANG": "C.UTF-8"}
        install(python, home, [str(wheels[0])])
        subprocess.run([str(python), str(CHECK), str(ROOT / "README.md")], cwd=folder, env=env, check=True)
        install(python, home, [f"p2pkv[proxy,ucx] @ {wheels[0].as_uri()}", str(benches[0])])
        subprocess.run(
            [str(python), str(CHECK), "--extras", str(ROOT / "README.md")], cwd=folder, env=env, check=True
        )
    with tempfile.TemporaryDirectory(prefix="p2pkv-quickstart-") as folder:
        (Path(folder) / "dist").mkdir()
        shutil.copy(wheels[0], Path(folder) / "dist")
        subprocess.run([sys.executable, str(WALK), str(ROOT / "docs/quickstart.md"), folder], check=True)


def install(python: Path, home: Path, what: list[str]) -> None:
    # with this process's environment, which may say where packages come from
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *what], cwd=home, check=True)


if __name__ == "__main__":
    main()
